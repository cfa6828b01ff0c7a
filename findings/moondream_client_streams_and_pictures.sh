#!/bin/sh
# moondream 2.6.1, the client of the model's makers, changes pictures and loses the end of streams without an error:
# - a photo that a camera marks as turned is sent as it is stored, and without the mark: the model sees it sideways;
# - a picture of 16 bits a pixel is clipped at 255, so that all but its darkest part is white;
# - a streamed answer that ends since the connection was closed in the middle is returned as if it were whole.
#
# Seen: "marked as turned by 90 degrees, sent (40, 20) with marks {}", "16 bits, 65535 and 30000: [255, 255]",
# "closed in the middle: ['two ']".
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check moondream==2.6.1 pillow==13.0.0
"$folder/venv/bin/python" - <<'PYTHON'
import base64
import http.server
import io
import json
import sys
import threading

import moondream
from PIL import Image

bodies = []


class Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        bodies.append(body)
        self.send_response(200)
        if not body["stream"]:
            self.send_header("content-length", "15")
            self.end_headers()
            self.wfile.write(b'{"caption":"a"}')
            return
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        event = b'data: {"chunk": "two "}\n\n'
        self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))  # neither "completed" nor the last chunk follows
        self.close_connection = True


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
model = moondream.vl(endpoint=f"http://127.0.0.1:{server.server_port}/v1", api_key="")


def sent(image):
    model.caption(image)
    return Image.open(io.BytesIO(base64.b64decode(bodies[-1]["image_url"].partition(",")[2])))


marks = Image.Exif()
marks[0x0112] = 6  # to be turned by 90 degrees
photo = io.BytesIO()
Image.new("RGB", (40, 20), "white").save(photo, "JPEG", exif=marks)
turned = sent(Image.open(photo))
deep = Image.new("I;16", (2, 1))
deep.putpixel((0, 0), 65535)
deep.putpixel((1, 0), 30000)
clipped = [sent(deep).getpixel((x, 0))[0] for x in range(2)]
answer = list(model.caption(deep, stream=True)["caption"])
print("moondream 2.6.1")
print(f"marked as turned by 90 degrees, sent {turned.size} with marks {dict(turned.getexif())}")
print(f"16 bits, 65535 and 30000: {clipped}")
print(f"closed in the middle: {answer}")
sys.exit(not (turned.size == (40, 20) and not turned.getexif() and clipped == [255, 255] and answer == ["two "]))
PYTHON
