// The same request as code. `request` is what `read` or `further` of form.js returns; images say how pictures are named.

/** What stands for an image in JSON until the words of the shell take its place: this and its number. */
const IMAGE = "\uE000";

/**
 * An image is null, `{address}`, or `{file, type, original}`: one, or for a conversation one for each message. `place`
 * has `origin`, `grpcAddress`, `isEncrypted`, `asksForTokens` and `model`.
 */
export function sample(language, request, images, place) {
  const text = { curl, python, grpcurl, openai }[language](chosen(request), images, place);
  const made = images.filter((image) => image?.original);
  return made.map((image) => `# ${image.file} is ${image.original} as JPEG.\n`).join("") + text;
}

/** The request without what the page adds to show its answer. */
function chosen({ body: { stream, settings = {}, ...body }, ...request }) {
  const { logprobs, ...others } = settings;
  return { ...request, body: Object.keys(others).length ? { ...body, settings: others } : body };
}

function curl({ skill, body, timeoutS }, images, place) {
  const headers = ["-H 'content-type: application/json'"];
  if (place.asksForTokens) headers.push('-H "authorization: Bearer $KESTREL_GRPC_TOKEN"');
  if (timeoutS) headers.push(`-H 'x-request-timeout: ${timeoutS}'`);
  const files = images.filter((image) => image?.file);
  const variable = (image) => (files.length > 1 ? `PICTURE_${files.indexOf(image) + 1}` : "PICTURE");
  const words = images.map((image) => image && (image.address ? shellText(image.address) : `$${variable(image)}`));
  const json = shellJson(withImages(body, images, "image_url"), words);
  const call = `curl -s ${place.origin}/v1/${skill} ${headers.join(" \\\n    ")} -d @- <<END\n${json}\nEND\n`;
  const set = files.map((image) => `${variable(image)}="data:${image.type};base64,${base64Of(image.file)}"\n`);
  return set.join("") + call;
}

/** The body with its images, for which `IMAGE` and a number stand. */
function withImages(body, images, field) {
  if (!body.messages) return images[0] ? { [field]: `${IMAGE}0`, ...body } : body;
  const messages = body.messages.map((message, index) =>
    images[index] ? { ...message, image_urls: [`${IMAGE}${index}`] } : message,
  );
  return { messages, ...body, messages };
}

function grpcurl({ skill, body, adapter, timeoutS }, images, place) {
  const method = {
    query: "Query",
    caption: "Caption",
    point: "Point",
    detect: "Detect",
    segment: "Segment",
    gaze: "Gaze",
    chat: "Chat",
  };
  const prefix = isText(skill) ? "Complete" : "";
  const options = [place.isEncrypted ? "" : " -plaintext"];
  if (place.asksForTokens) options.push(' -H "authorization: Bearer $KESTREL_GRPC_TOKEN"');
  if (timeoutS) options.push(` -max-time ${timeoutS}`);
  const words = images.map((image) => image && (image.address ? shellText(image.address) : base64Of(image.file)));
  const source = (index) => ({ [images[index].address ? "uri" : "data"]: `${IMAGE}${index}` });
  const made = message(body, adapter);
  if (made.messages) made.messages = made.messages.map((turn, index) => said(turn, images[index] && source(index)));
  const json = shellJson(images[0] && !made.messages ? { image: source(0), ...made } : made, words);
  const call = `kestrel.v1.VisionService/${prefix}${method[skill]}`;
  return `grpcurl${options.join("")} -d @ ${place.grpcAddress} ${call} <<END\n${json}\nEND\n`;
}

/** A message of a conversation as the gRPC contract has it. */
function said({ role, content }, image) {
  const parts = [...(image ? [{ image }] : []), { text: content }];
  return { role: `CHAT_ROLE_${role.toUpperCase()}`, parts };
}

function python({ skill, body, adapter, timeoutS }, images, place) {
  const imported = ["Client"];
  const named = (kind, sides) => {
    if (!imported.includes(kind)) imported.push(kind);
    return `${kind}(${sides.join(", ")})`;
  };
  const names = images.map((image) => (image === null ? "None" : literal(image.address ?? image.file)));
  const given = body.messages ? ["messages"] : [names[0]];
  const { n, ...settings } = body.settings ?? {};
  const keywords = { ...settings, ...body.constraint };
  if (body.question) given.push(literal(body.question));
  if (body.object ?? body.objects) given.push(literal(body.object ?? body.objects));
  if (body.eye) given.push(named("Point", body.eye));
  if (body.length) keywords.length = body.length;
  if (body.reasoning) keywords.reasoning = true;
  if (n) keywords.n = n;
  if (body.min_score !== undefined) keywords.min_score = body.min_score;
  if (adapter) keywords.adapter = adapter;
  if (body.priority) keywords.priority = body.priority;
  if (body.cache) keywords.cache = body.cache;
  if (body.max_queue_seconds !== undefined) keywords.max_queue_s = body.max_queue_seconds;
  if (timeoutS) keywords.timeout_s = timeoutS;
  const bias = keywords.logit_bias;
  if (bias) delete keywords.logit_bias;
  given.push(...Object.entries(keywords).map(([name, value]) => `${name}=${literal(value)}`));
  if (bias)
    given.push(
      `logit_bias={${Object.entries(bias)
        .map(([id, value]) => `${id}: ${value}`)
        .join(", ")}}`,
    );
  if (body.spatial_refs) {
    const refs = body.spatial_refs.map((sides) => named(sides.length === 2 ? "Point" : "Box", sides));
    given.push(`spatial_refs=[${refs.join(", ")}]`);
  }
  const address = place.isEncrypted ? `https://${place.grpcAddress}` : place.grpcAddress;
  const token = place.asksForTokens ? "# The token is in the variable KESTREL_GRPC_TOKEN.\n" : "";
  const lines = body.objects ? pythonGroups(skill, given.join(", ")) : pythonCall(skill, given.join(", "), n > 1);
  const block = lines.map((line) => `    ${line}\n`).join("");
  const turns = (body.messages ?? []).map(({ role, content }, index) => {
    const shows = images[index] ? `, [${names[index]}]` : "";
    return `    ${named("ChatMessage", [`${literal(role)}, ${literal(content)}${shows}`])},\n`;
  });
  const messages = turns.length ? `messages = [\n${turns.join("")}]\n` : "";
  return `from kestrel_client import ${imported.sort().join(", ")}\n\n${messages}${token}with Client(${literal(address)}) as client:\n${block}`;
}

function pythonCall(skill, given, hasSamples) {
  if (isText(skill)) {
    const field = skill === "caption" ? "caption" : "answer";
    const samples = hasSamples ? ["for other in result.alternatives:", `    print(other.${field})`] : [];
    return [`result = client.complete_${skill}(${given})`, `print(result.${field})`, ...samples];
  }
  return {
    point: [`for point in client.point(${given}).points:`, "    print(point.x, point.y)"],
    detect: [`for found in client.detect(${given}).objects:`, "    print(found.box)"],
    segment: [`for segment in client.segment(${given}).segments:`, "    print(segment.box, segment.svg_path)"],
    gaze: [`print(client.gaze(${given}).target)`],
  }[skill];
}

function pythonGroups(skill, given) {
  const found = skill === "point" ? "group.points" : "[found.box for found in group.objects]";
  return [`for group in client.${skill}(${given}).groups:`, `    print(group.object, ${found})`];
}

function openai({ skill, body, adapter, timeoutS }, images, place) {
  if (skill !== "query" && skill !== "chat") return "# OpenAI's API has questions only.\n";
  const { settings = {}, question, constraint, reasoning } = body;
  const { top_k, min_p, repetition_penalty, include_stop, ...standard } = settings;
  const extra = { reasoning, constraint, top_k, min_p, repetition_penalty, include_stop };
  for (const name of Object.keys(extra)) if (extra[name] === undefined) delete extra[name];
  const url = (image) => (image.address ? literal(image.address) : `data_url(${literal(image.file)}, ${literal(image.type)})`);
  const turns = (body.messages ?? [{ role: "user", content: question }]).map(({ role, content }, index) => {
    const parts = [`{"type": "text", "text": ${literal(content)}}`];
    if (images[index]) parts.push(`{"type": "image_url", "image_url": {"url": ${url(images[index])}}}`);
    return `{"role": ${literal(role)}, "content": ${images[index] ? `[${parts.join(", ")}]` : literal(content)}}`;
  });
  const given = [`model=${literal(adapter ? `${place.model}/${adapter}` : place.model)}`];
  given.push(turns.length > 1 ? `messages=[\n        ${turns.join(",\n        ")},\n    ]` : `messages=[${turns[0]}]`);
  given.push(...Object.entries(standard).map(([name, value]) => `${name}=${literal(value)}`));
  if (Object.keys(extra).length) given.push(`extra_body=${literal(extra)}`);
  if (timeoutS) given.push(`timeout=${literal(timeoutS)}`);
  const hasFiles = images.some((image) => image?.file);
  const imports = ["import base64", "import os"].filter((line) =>
    line.endsWith("os") ? place.asksForTokens : hasFiles,
  );
  const key = place.asksForTokens ? 'os.environ["KESTREL_GRPC_TOKEN"]' : '"none is asked for"';
  const lines = [...imports, ...(imports.length ? [""] : []), "from openai import OpenAI", ""];
  if (hasFiles) {
    lines.push("", "def data_url(name, kind):", '    with open(name, "rb") as file:');
    lines.push('        return f"data:{kind};base64,{base64.b64encode(file.read()).decode()}"', "", "");
  }
  lines.push(`client = OpenAI(base_url=${literal(`${place.origin}/v1`)}, api_key=${key})`);
  lines.push("answer = client.chat.completions.create(", ...given.map((line) => `    ${line},`), ")");
  lines.push("for choice in answer.choices:", "    print(choice.message.content)");
  const left = ["spatial_refs", "priority", "cache", "max_queue_seconds"].filter((name) => name in body);
  const note = left.length ? `# OpenAI's API has no ${left.join(", ")}.\n` : "";
  return `${note}${lines.join("\n")}\n`;
}

/** The body of a request over HTTP as a message of the gRPC contract, in JSON. */
function message(body, adapter) {
  const {
    settings = {},
    constraint,
    eye,
    length,
    spatial_refs,
    priority,
    cache,
    max_queue_seconds,
    model,
    ...made
  } = body;
  const { max_objects, logit_bias, ...sampling } = settings;
  if (length) made.length = `CAPTION_LENGTH_${length.toUpperCase()}`;
  if (eye) made.eye = { x: eye[0], y: eye[1] };
  if (spatial_refs) made.spatial_refs = spatial_refs.map(reference);
  if (max_objects !== undefined) made.max_objects = max_objects;
  if (logit_bias) {
    sampling.logit_bias = Object.entries(logit_bias).map(([id, bias]) => ({ token_id: Number(id), bias }));
  }
  if (Object.keys(sampling).length) made.sampling = sampling;
  if (constraint?.choices) made.constraint = { choices: { values: constraint.choices } };
  else if (constraint?.json_schema !== undefined)
    made.constraint = { json_schema: JSON.stringify(constraint.json_schema) };
  else if (constraint) made.constraint = constraint;
  const options = {};
  if (adapter) options.adapter = adapter;
  if (priority) options.priority = `PRIORITY_${priority.toUpperCase()}`;
  if (cache) options.cache = `CACHE_POLICY_${cache.toUpperCase()}`;
  if (max_queue_seconds !== undefined) options.max_queue_duration = `${max_queue_seconds}s`;
  if (Object.keys(options).length) made.options = options;
  return made;
}

function reference(sides) {
  if (sides.length === 2) return { point: { x: sides[0], y: sides[1] } };
  const [x_min, y_min, x_max, y_max] = sides;
  return { box: { x_min, y_min, x_max, y_max } };
}

function isText(skill) {
  return ["query", "caption", "chat"].includes(skill);
}

/** An object as JSON in a here-document, in which a shell expands variables; `words` take the places of images. */
function shellJson(value, words) {
  const json = shellText(JSON.stringify(value, null, 2));
  return words.reduce((text, word, index) => (word === null ? text : text.replace(`"${IMAGE}${index}"`, () => `"${word}"`)), json);
}

/** A text in a here-document. */
function shellText(text) {
  return text.replace(/[\\$`]/g, "\\$&");
}

function base64Of(file) {
  return `$(base64 < '${file.replaceAll("'", "'\\''")}' | tr -d '\\n')`;
}

/** A value as Python writes it. */
function literal(value) {
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null) return "None";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value)
      .map(([key, item]) => `${literal(key)}: ${literal(item)}`)
      .join(", ")}}`;
  }
  return JSON.stringify(value);
}
