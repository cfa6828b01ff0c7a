// Asks a Kestrel gRPC server about a picture: node dist/src/example.js ADDRESS PICTURE
import { readFile } from "node:fs/promises";
import { argv, stdout } from "node:process";
import { Code, ConnectError, createClient } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";
import { ErrorInfoSchema } from "../gen/google/rpc/error_details_pb.js";
import { ChatRole, VisionService } from "../gen/kestrel/v1/vision_service_pb.js";

const [address, picture] = argv.slice(2);
const vision = createClient(
  VisionService,
  createGrpcTransport({ baseUrl: `http://${address}`, defaultTimeoutMs: 60_000 }), // the deadline of every call
);
const image = { source: { case: "data" as const, value: await readFile(picture) } };

// A stream: pieces of the answer as they are generated, then the whole.
stdout.write("query: ");
let said = "";
const query = { question: "What is in this image?", image, sampling: { temperature: 0 } };
for await (const { event } of vision.query(query)) {
  if (event.case === "delta") stdout.write(event.value.text);
  if (event.case === "completed") {
    stdout.write(` (${event.value.info?.usage?.outputTokenCount} tokens)\n`);
    said = event.value.answer;
  }
}

// A conversation: what was asked and answered before, each message with its texts and images, and a question.
const text = (value: string) => ({ part: { case: "text" as const, value } });
const chat = await vision.completeChat({
  messages: [
    { role: ChatRole.USER, parts: [{ part: { case: "image", value: image } }, text(query.question)] },
    { role: ChatRole.ASSISTANT, parts: [text(said)] },
    { role: ChatRole.USER, parts: [text("What color is the star?")] },
  ],
  sampling: { temperature: 0 },
});
console.log("chat:", chat.result?.answer);

const found = await vision.detect({ object: "shape", image });
for (const { box } of found.objects) {
  if (box) console.log("detect:", ...[box.xMin, box.yMin, box.xMax, box.yMax].map((side) => side.toFixed(2)));
}

// The details of a status say why, in words that programs can compare.
try {
  await vision.detect({ object: "shape", image, options: { model: "other" } });
} catch (failure) {
  const error = ConnectError.from(failure);
  for (const info of error.findDetails(ErrorInfoSchema)) console.log(`error: ${info.reason}: ${error.rawMessage}`);
}

// A deadline that passes, and a cancellation: each frees what the request holds in the server.
const long = { question: "?", constraint: { kind: { case: "regex" as const, value: "[a-z ]{900}" } } }; // 900 letters
const codeOf = async (ask: () => Promise<void>) =>
  ask().then(() => undefined, (failure: unknown) => ConnectError.from(failure).code);

const late = await codeOf(async () => {
  for await (const _ of vision.query(long, { timeoutMs: 500 }));
});
console.log("deadline has passed:", late === Code.DeadlineExceeded);

const controller = new AbortController();
const stopped = await codeOf(async () => {
  for await (const _ of vision.query(long, { signal: controller.signal })) controller.abort();
});
console.log("cancelled:", stopped === Code.Canceled);
