"""What paging saves in kvruntime, and what it costs: memory, time to the first token, bookkeeping."""
