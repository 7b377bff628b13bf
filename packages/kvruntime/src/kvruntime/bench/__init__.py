"""Load for servers and for the engine itself: requests, their times, and what the times say.

`prompts` makes what is asked, `arrivals` says when, `client` asks a server, `load` keeps to the times,
`figures` turns them into latencies and `plot` draws them; `throughput` asks an engine in this process.
Only `client` needs httpx and only `plot` matplotlib, both of the extra `bench`.
"""
