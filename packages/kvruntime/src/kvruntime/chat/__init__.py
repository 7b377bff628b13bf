"""Conversations in a terminal: `session` keeps them, `local` and `remote` answer, `terminal` shows.

`remote` needs httpx, of the extra `bench`.
"""
