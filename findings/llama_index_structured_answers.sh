#!/bin/sh
# llama-index-llms-openai-like 0.8.1 asks for structured answers (`as_structured_llm`, default settings) with
# `tool_choice: "required"` and no `tools`, which OpenAI's API does not define, and writes the schema into the prompt
# with every brace doubled, so that it is no JSON. With `should_use_structured_outputs=True` it sends neither.
#
# Seen: "default: tool_choice required, tools absent, braces doubled True",
# "structured outputs: tool_choice absent, tools absent, braces doubled False".
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check llama-index-llms-openai-like==0.8.1
"$folder/venv/bin/python" - <<'PYTHON'
import http.server
import json
import sys
import threading

from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

bodies = []
message = {"role": "assistant", "content": '{"name": "cat"}'}
answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
answer["choices"] = [{"index": 0, "finish_reason": "stop", "message": message}]


class Server(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())


class Animal(BaseModel):
    name: str


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
seen = []
print("llama-index-llms-openai-like 0.8.1")
for name, options in (("default", {}), ("structured outputs", {"should_use_structured_outputs": True})):
    address = f"http://127.0.0.1:{server.server_port}/v1"
    model = OpenAILike(model="m", api_base=address, api_key="none", is_chat_model=True, **options)
    model.as_structured_llm(Animal).complete("Which animal is it?")
    body = bodies[-1]
    doubled = '{{"properties"' in str(body["messages"][-1]["content"])
    seen.append((body.get("tool_choice", "absent"), "present" if "tools" in body else "absent", doubled))
    print(f"{name}: tool_choice {seen[-1][0]}, tools {seen[-1][1]}, braces doubled {doubled}")
sys.exit(seen != [("required", "absent", True), ("absent", "absent", False)])
PYTHON
