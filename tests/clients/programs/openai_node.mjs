// OpenAI's package for Node against our routes: answers, streams, and its classes of errors.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const facts = JSON.parse(process.argv[2]);
const url = "data:image/png;base64," + readFileSync(facts.picture).toString("base64");
const messages = [
  { role: "user", content: [{ type: "text", text: "What is in this image?" }, { type: "image_url", image_url: { url } }] },
];
const client = (apiKey, options = {}) => new OpenAI({ baseURL: `${facts.http}/v1`, apiKey, ...options });
const alice = client(facts.alice, { maxRetries: 0 });

const models = [];
for await (const model of alice.models.list()) models.push(model.id);
assert.equal(models.length, 1);
const [model] = models;
console.log("models");

const sampling = { model, messages, temperature: 0, max_tokens: 16 };
const whole = await alice.chat.completions.create(sampling);
const text = whole.choices[0].message.content;
assert.match(text, /star/);
console.log("chat with an image");

let joined = "";
let usage = null;
for await (const chunk of await alice.chat.completions.create({
  ...sampling,
  stream: true,
  stream_options: { include_usage: true },
})) {
  joined += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(joined, text);
assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
console.log("streamed chat");

const several = await alice.chat.completions.create({ ...sampling, temperature: 5, seed: 7, n: 2, stop: ["never"] });
assert.deepEqual(several.choices.map((choice) => choice.index), [0, 1]);
console.log("several samples");

const told = await alice.chat.completions.create({ ...sampling, logprobs: true, top_logprobs: 2 });
assert.ok(told.choices[0].logprobs.content.every((piece) => piece.logprob <= 0 && piece.top_logprobs.length === 2));
console.log("logprobs");

const helper = alice.chat.completions.stream(sampling);
assert.equal(await helper.finalContent(), text);
console.log("the package's own stream helper");

const stream = await alice.chat.completions.create({ ...sampling, temperature: 5, max_tokens: 512, stream: true });
for await (const _ of stream) break;
console.log("a stream that is closed early");

const done = await alice.completions.create({ model, prompt: "What is a star?", max_tokens: 8, temperature: 0 });
assert.equal(done.object, "text_completion");
console.log("completions");

const schema = {
  type: "object",
  properties: { colour: { enum: ["red", "blue"] } },
  required: ["colour"],
  additionalProperties: false,
};
const shaped = await alice.chat.completions.create({
  ...sampling,
  response_format: { type: "json_schema", json_schema: { name: "colours", schema, strict: true } },
});
assert.ok(["red", "blue"].includes(JSON.parse(shaped.choices[0].message.content).colour));
console.log("response formats");

const tools = [{ type: "function", function: { name: "paint", parameters: schema } }];
const called = await alice.chat.completions.create({ ...sampling, max_tokens: 64, tools, tool_choice: "required" });
const [call] = called.choices[0].message.tool_calls;
assert.equal(call.function.name, "paint");
assert.ok(["red", "blue"].includes(JSON.parse(call.function.arguments).colour));
const turns = [...messages, called.choices[0].message, { role: "tool", tool_call_id: call.id, content: "painted" }];
const second = await alice.chat.completions.create({ ...sampling, messages: turns, tools });
assert.ok(second.choices[0].message.content);
console.log("tools");

const input = [
  {
    role: "user",
    content: [
      { type: "input_text", text: "What is in this image?" },
      { type: "input_image", image_url: url, detail: "auto" },
    ],
  },
];
const response = await alice.responses.create({ model, input, temperature: 0, max_output_tokens: 16 });
assert.match(response.output_text, /star/);
let pieces = "";
for await (const event of await alice.responses.create({ model, input, temperature: 0, max_output_tokens: 16, stream: true })) {
  if (event.type === "response.output_text.delta") pieces += event.delta;
}
assert.equal(pieces, response.output_text);
console.log("responses");

const refuse = (kind, code, call) =>
  assert.rejects(call, (error) => error instanceof kind && error.code === code && Boolean(error.requestID));
await refuse(OpenAI.AuthenticationError, "invalid_api_key", () => client("wrong", { maxRetries: 0 }).models.list());
await refuse(OpenAI.PermissionDeniedError, "scope_required", () =>
  client(facts.operator, { maxRetries: 0 }).chat.completions.create(sampling),
);
await refuse(OpenAI.NotFoundError, "model_not_found", () =>
  alice.chat.completions.create({ ...sampling, model: "gull" }),
);
await refuse(OpenAI.BadRequestError, "invalid_request", () => alice.embeddings.create({ model, input: "hi" }));
await refuse(OpenAI.BadRequestError, "unsupported_parameter", () =>
  alice.chat.completions.create({ ...sampling, functions: [{ name: "f" }] }),
);
console.log("classes of errors");

// The token allows one call at once, and two in a second: the package waits as it is told, and tries again.
const limited = client(facts.limited, { maxRetries: 3 });
for (let number = 0; number < 3; number++) await limited.models.list();
console.log("rate limit, and retries that succeed");
