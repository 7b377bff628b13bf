"""A server of its own process, and two chats that begin alike: the second finds the first one's blocks.

It needs `pip install 'kvruntime[gguf,serve]'` and the checkpoint of the demo.
"""

# %% Start it on any free port. It says where it listens, then loads.
import atexit
import http.client
import json
import subprocess
import sys
import time
from typing import Any

command = [sys.executable, "-m", "kvruntime", "serve", "--model", "smollm2", "--port", "0"]
server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)  # noqa: S603 -- our own
atexit.register(server.kill)  # whatever happens below
assert server.stderr is not None
port = next(
    int(line.rpartition(":")[2]) for line in server.stderr if line.startswith("listening on")
)


def ask(method: str, path: str, body: object = None) -> tuple[int, Any]:
    """One request, as any client of OpenAI's interface makes it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request(
        method, path, body and json.dumps(body), {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    content = json.loads(answer.read())
    connection.close()
    return answer.status, content


# %% While it loads it answers 503, with how long to wait.
while ask("GET", "/ready")[0] != 200:
    time.sleep(0.2)

# %% Two chats with one system prompt.
system = {
    "role": "system",
    "content": "You are a patient teacher. Answer in one short sentence, and say nothing else.",
}
cached = []
for question in ("What is the capital of France?", "In which country is Tokyo?"):
    messages = [system, {"role": "user", "content": question}]
    body = {"model": "smollm2", "messages": messages, "max_tokens": 16, "temperature": 0}
    status, answer = ask("POST", "/v1/chat/completions", body)
    assert status == 200, answer
    print(answer["choices"][0]["message"]["content"])
    cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
print("prompt tokens from the cache:", cached)
assert cached[0] == 0
assert cached[1] >= 16

# %% What cannot be served is refused before anything runs, with the numbers.
body = {"model": "smollm2", "prompt": "x", "temperature": -1}
status, refusal = ask("POST", "/v1/completions", body)
print(status, refusal["error"]["message"])
assert status == 400

# %% Stop it: it finishes what runs, and says so.
server.terminate()
_, said = server.communicate(timeout=60)
print(said.splitlines()[-1])
