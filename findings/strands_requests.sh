#!/bin/sh
# strands-agents 1.62.0 sends with its OpenAI provider what OpenAI's API does not define: an agent without tools sends
# an empty list of tools, and a picture has a field `format` within `image_url`. A server that refuses fields it does
# not know, or a list of no tools, cannot be used with it.
#
# Seen: "tools: []", "fields of image_url: detail, format, url".
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'strands-agents[openai]==1.62.0' openai==2.54.0 pillow==13.0.0
"$folder/venv/bin/python" - <<'PYTHON'
import http.server
import io
import json
import sys
import threading

from PIL import Image
from strands import Agent
from strands.models.openai import OpenAIModel

bodies = []


class Server(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for delta, reason in (({"role": "assistant", "content": "a cat"}, None), ({}, "stop")):
            chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
            chunk["choices"] = [{"index": 0, "delta": delta, "finish_reason": reason}]
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
file = io.BytesIO()
Image.new("RGB", (5, 3)).save(file, "PNG")
options = {"base_url": f"http://127.0.0.1:{server.server_port}/v1", "api_key": "none"}
agent = Agent(model=OpenAIModel(client_args=options, model_id="m"), callback_handler=None)
agent([{"text": "What is it?"}, {"image": {"format": "png", "source": {"bytes": file.getvalue()}}}])
body = bodies[0]
fields = sorted(next(part for part in body["messages"][0]["content"] if part["type"] == "image_url")["image_url"])
print(f"strands-agents 1.62.0\ntools: {body.get('tools')}\nfields of image_url: {', '.join(fields)}")
sys.exit(not (body.get("tools") == [] and fields == ["detail", "format", "url"]))
PYTHON
