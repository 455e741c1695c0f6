// Builds bundle.js from editor.js and the packages of package-lock.json, and bundle.LICENSE.txt from their licences.
// The first line of the bundle has the hash of both files, which a test compares.

import { createHash } from "node:crypto";
import { readFileSync, writeFileSync } from "node:fs";

import { build } from "esbuild";

const SOURCES = ["editor.js", "package-lock.json"];
const hash = createHash("sha256");
for (const source of SOURCES) hash.update(readFileSync(source));

const { metafile } = await build({
    entryPoints: ["editor.js"],
    outfile: "bundle.js",
    bundle: true,
    format: "esm",
    target: "es2022",
    minify: true,
    metafile: true,
    banner: { js: `// By make editor, from ${SOURCES.join(" and ")} with sha256 ${hash.digest("hex")}` },
});

const packageOf = (path) => path.match(/node_modules\/((?:@[^/]+\/)?[^/]+)/)?.[1];
const packages = [...new Set(Object.keys(metafile.inputs).map(packageOf).filter(Boolean))].sort();
const licences = packages.map((name) => {
    const { version } = JSON.parse(readFileSync(`node_modules/${name}/package.json`));
    return `${name} ${version}\n\n${readFileSync(`node_modules/${name}/LICENSE`, "utf8").trim()}\n`;
});
writeFileSync("bundle.LICENSE.txt", licences.join(`\n${"-".repeat(80)}\n\n`));
