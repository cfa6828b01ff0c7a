// @grpc/grpc-js with @grpc/proto-loader: an answer, a stream, boxes, a status, a deadline, a cancellation.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

const facts = JSON.parse(process.argv[2]);
const definition = loadSync("kestrel/v1/vision_service.proto", { includeDirs: [facts.proto, facts.google], longs: Number });
const { VisionService } = grpc.loadPackageDefinition(definition).kestrel.v1;
const vision = new VisionService(facts.grpc, grpc.credentials.createInsecure());
const image = { data: readFileSync(facts.picture) };
const metadata = new grpc.Metadata();
metadata.set("authorization", `Bearer ${facts.alice}`);

// Names are in camelCase: it drops others silently.
const call = (method, request, sent = metadata) =>
  new Promise((resolve, reject) =>
    vision[method](request, sent, (error, response) => (error ? reject(error) : resolve(response))),
  );
const read = (request, options = {}, seen = () => {}) =>
  new Promise((resolve, reject) => {
    let text = "";
    const stream = vision.query(request, metadata, options);
    stream.on("data", (message) => {
      text += message.delta?.text ?? "";
      seen(stream);
    });
    stream.on("error", reject);
    stream.on("end", () => resolve(text));
  });

const query = { question: "What is in this image?", image, sampling: { temperature: 0 } };
const { result: { answer, info } } = await call("completeQuery", query);
assert.match(answer, /star/);
assert.ok(info.usage.outputTokenCount > 0);
console.log("a whole answer");

assert.equal(await read(query), answer);
console.log("a stream");

const { objects } = await call("detect", { object: "star", image });
assert.ok(objects.every(({ box }) => 0 <= box.xMin && box.xMin <= box.xMax && box.xMax <= 1));
console.log("boxes");

const wrong = { object: "star", image, options: { model: "gull" } };
await assert.rejects(call("detect", wrong), (error) => {
  assert.equal(error.code, grpc.status.NOT_FOUND);
  return error.metadata.get("grpc-status-details-bin").some((details) => details.includes("MODEL_NOT_FOUND"));
});
await assert.rejects(call("detect", wrong, new grpc.Metadata()), { code: grpc.status.UNAUTHENTICATED });
console.log("statuses with details");

const long = { question: "?", constraint: { regex: "[a-z ]{900}" } };
await assert.rejects(read(long, { deadline: Date.now() + 500 }), { code: grpc.status.DEADLINE_EXCEEDED });
await assert.rejects(read(long, {}, (stream) => stream.cancel()), { code: grpc.status.CANCELLED });
console.log("a deadline and a cancellation");
vision.close();
