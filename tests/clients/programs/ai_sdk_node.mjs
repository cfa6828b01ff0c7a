// Vercel's AI SDK against our OpenAI APIs: a picture, streams, tools with their results, objects, Responses.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, isStepCount, streamText, tool } from "ai";
import { z } from "zod";

const facts = JSON.parse(process.argv[2]);
const options = { baseURL: `${facts.http}/v1`, apiKey: facts.alice };
const headers = { authorization: `Bearer ${facts.alice}` };
const name = (await (await fetch(`${facts.http}/v1/models`, { headers })).json()).data[0].id;
const compatible = createOpenAICompatible({ name: "kestrel", ...options, supportsStructuredOutputs: true })(name);
const content = [
  { type: "text", text: "What is in this image?" },
  { type: "image", image: readFileSync(facts.picture), mediaType: "image/png" },
];
const common = { messages: [{ role: "user", content }], temperature: 0, maxOutputTokens: 64, maxRetries: 0 };
const colour = z.enum(["red", "blue"]);

for (const [kind, model] of [["compatible", compatible], ["Responses", createOpenAI(options)(name)]]) {
  const { text, usage } = await generateText({ ...common, model });
  assert.match(text, /star/);
  assert.ok(usage.outputTokens > 0);
  let joined = "";
  for await (const piece of streamText({ ...common, model }).textStream) joined += piece;
  assert.equal(joined, text);
  console.log(`${kind}: picture and stream`);

  const painted = [];
  const paint = tool({
    description: "Paints in a colour.",
    inputSchema: z.object({ colour }),
    execute: async (input) => {
      painted.push(input.colour);
      return `painted in ${input.colour}`;
    },
  });
  const choose = ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" });
  const looped = { ...common, model, tools: { paint }, prepareStep: choose, stopWhen: isStepCount(2) };
  const { steps } = await generateText(looped);
  assert.deepEqual(steps[0].toolCalls.map((call) => [call.toolName, colour.safeParse(call.input.colour).success]), [
    ["paint", true],
  ]);
  assert.equal(steps.length, 2);
  assert.ok(steps[1].text);
  const again = await streamText(looped).steps;
  assert.deepEqual(again[0].toolCalls.map((call) => call.input), steps[0].toolCalls.map((call) => call.input));
  assert.equal(painted.length, 2);
  console.log(`${kind}: a forced call, and a step with its result, whole and streamed`);

  const output = Output.object({ schema: z.object({ colour, count: z.number().int().min(0).max(9) }) });
  const shaped = await generateText({ ...common, model, output });
  assert.ok(colour.safeParse(shaped.output.colour).success);
  console.log(`${kind}: objects`);
}
