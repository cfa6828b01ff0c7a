// nice-grpc with definitions of @grpc/proto-loader: an answer, a stream, boxes, a status with details, a cancellation.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { loadSync } from "@grpc/proto-loader";
import { Metadata, Status, createChannel, createClientFactory } from "nice-grpc";
import { errorDetailsClientMiddleware, ErrorInfo, RichClientError } from "nice-grpc-error-details";

const facts = JSON.parse(process.argv[2]);
const definition = loadSync("kestrel/v1/vision_service.proto", { includeDirs: [facts.proto, facts.google] });
// The loader keeps methods by the names of the contract; nice-grpc calls them by the keys.
const methods = Object.values(definition["kestrel.v1.VisionService"]).map((method) => [method.originalName, method]);
const channel = createChannel(facts.grpc);
const factory = createClientFactory().use(errorDetailsClientMiddleware);
const clientOf = (token) =>
  factory.create(Object.fromEntries(methods), channel, {
    "*": { metadata: Metadata({ authorization: `Bearer ${token}` }) },
  });
const vision = clientOf(facts.alice);
const image = { data: readFileSync(facts.picture) };

const query = { question: "What is in this image?", image, sampling: { temperature: 0 } };
const { result: { answer } } = await vision.completeQuery(query);
assert.match(answer, /star/);
console.log("a whole answer");

let text = "";
for await (const { delta } of vision.query(query)) text += delta?.text ?? "";
assert.equal(text, answer);
console.log("a stream");

const { objects } = await vision.detect({ object: "star", image });
assert.ok(objects.every(({ box }) => 0 <= box.xMin && box.xMin <= box.xMax && box.xMax <= 1));
console.log("boxes");

const wrong = { object: "star", image, options: { model: "gull" } };
await assert.rejects(vision.detect(wrong), (error) => {
  assert.ok(error instanceof RichClientError);
  assert.equal(error.code, Status.NOT_FOUND);
  return error.extra.some((detail) => detail.$type === ErrorInfo.$type && detail.reason === "MODEL_NOT_FOUND");
});
await assert.rejects(clientOf("wrong").detect(wrong), { code: Status.UNAUTHENTICATED });
console.log("statuses with details");

const controller = new AbortController();
const long = { question: "?", constraint: { regex: "[a-z ]{900}" } };
await assert.rejects(
  async () => {
    for await (const _ of vision.query(long, { signal: controller.signal })) controller.abort();
  },
  { name: "AbortError" },
);
console.log("a cancellation");
channel.close();
