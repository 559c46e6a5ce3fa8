// Runs the page's script on stand-ins of the browser's objects: node page_script.js SCRIPT STATE.
// STATE: a JSON file of the answers to its requests, in order; null means that nothing answers.
// Prints what the page shows after each: state, title, texts and outdated, one JSON object a line.
"use strict";
const [fs, vm] = [require("fs"), require("vm")];

class Node {
  constructor() { this.children = []; this.dataset = {}; this.textContent = ""; this.className = ""; }
  setAttribute() {}
  append(...nodes) { this.children.push(...nodes); }
  replaceChildren(...nodes) { this.children = nodes; }
  texts() { return [this.textContent, ...this.children.flatMap((child) => child.texts())].filter((text) => text !== ""); }
}

const places = new Map();
const place = (id) => places.get(id) || places.set(id, new Node()).get(id);
const document = {
  title: "", body: new Node(), getElementById: place,
  createElement: () => new Node(), createElementNS: () => new Node(),
};
const answers = JSON.parse(fs.readFileSync(process.argv[3], "utf8"));
const context = {
  document, location: { hash: "" }, TypeError,
  fetch: async () => {
    const answer = answers.shift();
    if (answer === null) throw new context.TypeError("Failed to fetch");
    return { ok: true, json: async () => answer };
  },
  setTimeout: (again) => {
    const texts = Object.fromEntries([...places].map(([id, node]) => [id, node.texts()]));
    console.log(JSON.stringify({ title: document.title, outdated: document.body.dataset.outdated === "yes", texts }));
    if (answers.length) again();
  },
};
vm.runInNewContext(fs.readFileSync(process.argv[2], "utf8"), context);
