// Prints for each manifest what is wrong with it. Two checks are needed: the schemas know values and required fields
// but allow unknown fields, which the types refuse.
import { readFileSync, writeFileSync } from "node:fs";
import ts from "typescript";

// A list of {module, kind, manifest}, where `module` has the class of the kind.
const items = JSON.parse(readFileSync(0, "utf8"));
const files = items.map((_, index) => `manifest${index}.ts`);

items.forEach(({ module, kind, manifest }, index) => {
  writeFileSync(
    files[index],
    `import type { I${kind} } from "${module}";\nexport const manifest: I${kind} = ${JSON.stringify(manifest)};\n`,
  );
});
const program = ts.createProgram(files, {
  strict: true,
  skipLibCheck: true,
  module: ts.ModuleKind.NodeNext,
  target: ts.ScriptTarget.ES2022,
  types: [],
});

const complaints = [];
for (const [index, { module, kind, manifest }] of items.entries()) {
  const found = ts
    .getPreEmitDiagnostics(program, program.getSourceFile(files[index]))
    .map((diagnostic) => ts.flattenDiagnosticMessageText(diagnostic.messageText, " "));
  const Kind = (await import(module))[kind];
  try {
    new Kind(manifest).validate();
  } catch (error) {
    found.push(error.message);
  }
  complaints.push(found);
}
console.log(JSON.stringify(complaints));
