// @connectrpc/connect-node with stubs of protoc-gen-es: an answer, a stream, boxes, a status, a cancellation.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdirSync, readFileSync, readdirSync } from "node:fs";
import { join } from "node:path";
import { Code, ConnectError, createClient } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";

const facts = JSON.parse(process.argv[2]);
const here = import.meta.dirname;
const generated = join(here, "stubs");
mkdirSync(generated, { recursive: true });
const files = readdirSync(join(facts.proto, "kestrel/v1")).map((name) => `kestrel/v1/${name}`);
const plugin = join(here, "node_modules/.bin/protoc-gen-es");
execFileSync(
  facts.python,
  ["-m", "grpc_tools.protoc", `--plugin=protoc-gen-es=${plugin}`, `--es_out=${generated}`, "--es_opt=target=js,import_extension=js",
    `--proto_path=${facts.proto}`, `--proto_path=${facts.google}`, ...files, "google/rpc/error_details.proto"],
  { env: { ...process.env, PATH: `${join(process.execPath, "..")}:${process.env.PATH}` }, stdio: "inherit" },
);
const { VisionService } = await import("./stubs/kestrel/v1/vision_service_pb.js");
const { ErrorInfoSchema } = await import("./stubs/google/rpc/error_details_pb.js");

const bearing = (token) => (next) => (request) => {
  request.header.set("authorization", `Bearer ${token}`);
  return next(request);
};
const clientOf = (token) =>
  createClient(VisionService, createGrpcTransport({ baseUrl: `http://${facts.grpc}`, interceptors: [bearing(token)] }));
const vision = clientOf(facts.alice);
const image = { source: { case: "data", value: readFileSync(facts.picture) } };

const query = { question: "What is in this image?", image, sampling: { temperature: 0 } };
const { result: { answer } } = await vision.completeQuery(query);
assert.match(answer, /star/);
console.log("a whole answer");

let text = "";
for await (const { event } of vision.query(query)) if (event.case === "delta") text += event.value.text;
assert.equal(text, answer);
console.log("a stream");

const { objects } = await vision.detect({ object: "star", image });
assert.ok(objects.every(({ box }) => 0 <= box.xMin && box.xMin <= box.xMax && box.xMax <= 1));
console.log("boxes");

const wrong = { object: "star", image, options: { model: "gull" } };
await assert.rejects(vision.detect(wrong), (failure) => {
  const error = ConnectError.from(failure);
  assert.equal(error.code, Code.NotFound);
  return error.findDetails(ErrorInfoSchema).some((info) => info.reason === "MODEL_NOT_FOUND");
});
await assert.rejects(clientOf("wrong").detect(wrong), { code: Code.Unauthenticated });
console.log("statuses with details");

const long = { question: "?", constraint: { kind: { case: "regex", value: "[a-z ]{900}" } } };
const all = async (options, seen = () => {}) => {
  for await (const _ of vision.query(long, options)) seen();
};
await assert.rejects(all({ timeoutMs: 500 }), { code: Code.DeadlineExceeded });
const controller = new AbortController();
await assert.rejects(all({ signal: controller.signal }, () => controller.abort()), { code: Code.Canceled });
console.log("a deadline and a cancellation");
process.exit(0); // its sessions stay open for a while
