// The explorer of notebook 02 without a kernel: choices of experts by hand, and the picture that they make.
// It draws what `routing_picture` of moeblaze_ref/course/notebook/explorer.py draws; a test compares the two.
"use strict";

const EMPTY = -1;
const range = (length) => [...Array(length).keys()];
const count = (values, value) => values.filter((one) => one === value).length;
const repeat = (counts) => counts.flatMap((number, value) => Array(number).fill(value));
const sums = (counts) => counts.reduce((total, number) => [...total, total.at(-1) + number], [0]);

// The arrays ----------------------------------------------------------------------------------------------------------

// The structures of a routing; slot token * k + j is a token's j-th choice.
function dispatch(choices, E) {
  const [L, k] = [choices.length, choices[0].length];
  const experts = choices.flat(); // of each slot
  const slots = range(L * k).sort((one, other) => experts[one] - experts[other] || one - other); // in expert order
  const positions = range(L * k).map((slot) => slots.indexOf(slot));
  const lengths = range(E).map((expert) => count(experts, expert));
  return { L, k, E, R: L * k, choices, experts, slots, positions, lengths, offsets: sums(lengths) };
}

const tokens = (slots, k) => slots.map((slot) => (slot === EMPTY ? EMPTY : Math.floor(slot / k)));

// Rows of a fixed capacity, in which the first choices of all tokens come first; then the slots that find no row.
function fill({ L, k, E, experts }, capacity) {
  const claims = range(k).flatMap((j) => range(L).map((token) => token * k + j));
  const queues = range(E).map((expert) => claims.filter((slot) => experts[slot] === expert));
  const rows = queues.flatMap((queue) => range(capacity).map((row) => queue[row] ?? EMPTY));
  const dropped = queues.flatMap((queue) => queue.slice(capacity)).sort((one, other) => one - other);
  return { rows, dropped };
}

// Rows of each expert, filled up to whole blocks.
function pad({ E, slots, lengths, offsets }, block) {
  const padded = lengths.map((length) => Math.ceil(length / block) * block);
  const rows = range(E).flatMap((expert) =>
    range(padded[expert]).map((row) => (row < lengths[expert] ? slots[offsets[expert] + row] : EMPTY)));
  return { rows, owners: repeat(padded) };
}

// The pictures --------------------------------------------------------------------------------------------------------

// Cells and texts of the dense map and of the structures, in cells' widths.
function drawArrays({ L, k, E, R, choices, experts, slots, positions, lengths, offsets }, colors) {
  const [middle, right, below] = [k + 2, k + E + 4, L + 1.5];
  const width = Math.max(right + Math.max(k, E + 1), k + 2 + R) + 3;
  const numbers = range(E);
  const byToken = (values) => range(L).map((token) => values.slice(token * k, (token + 1) * k));
  const map = choices.map((chosen, token) => numbers.map((expert) => (chosen.includes(expert) ? token : EMPTY)));
  const arrays = [
    ["topk_experts", 0, 0, choices, choices],
    ["token_expert_indices", middle, below + 2.2, [experts], [experts]],
    ["dense map", middle, 0, map, map.map(() => numbers)],
    ["token_index_map", right, 0, byToken(positions), choices],
    ["lengths", middle, below, [lengths], [numbers]],
    ["expert_token_offsets", right, below, [offsets], [[...numbers, EMPTY]]],
    ["expert_token_indices", middle, below + 4.4, [tokens(slots, k)], [repeat(lengths)]],
  ];
  const texts = [
    { x: -2, y: -2, text: `R = ${R} routed rows of ${L} tokens and ${E} experts`, anchor: "start", bold: true },
    ...range(L).map((token) => ({ x: -0.3, y: token + 0.5, text: `token ${token}`, anchor: "end" })),
    ...numbers.map((expert) => ({ x: middle + expert + 0.5, y: L + 0.4, text: `e${expert}` })),
  ];
  const cells = [];
  for (const [name, left, top, values, owners] of arrays) {
    values.forEach((row, down) => row.forEach((value, across) => {
      const owner = owners[down][across];
      const face = value === EMPTY || owner === EMPTY ? colors.pale : colors.experts[owner];
      const text = value === EMPTY ? "" : value;
      cells.push({ x: left + across, y: top + down, width: 1, height: 1, face, edge: "#ffffff", text });
    }));
    texts.push({ x: left, y: top - 0.35, text: name, anchor: "start" });
  }
  return { box: [-2, -2.5, width, L + 9.7], cells, texts };
}

// Cells and texts of the rows that three systems make of a routing.
function drawBins(routed, factor, block, colors) {
  const { k, E, R, experts, slots, lengths } = routed;
  const capacity = Math.ceil((factor * R) / E);
  const { rows, dropped } = fill(routed, capacity);
  const padded = pad(routed, block);
  const padding = count(rows, EMPTY);
  const strips = [
    strip(colors, 0, tokens(rows, k), repeat(Array(E).fill(capacity))),
    strip(colors, 0, tokens(dropped, k), dropped.map((slot) => experts[slot]), rows.length + 1, "crossed"),
    strip(colors, 3.3, tokens(padded.rows, k), padded.owners),
    strip(colors, 6.6, tokens(slots, k), repeat(lengths), 0, "pale"),
  ];
  const said = [
    [0, `capacity: E*C = ${E} * ${capacity} rows; ${dropped.length} dropped, ${padding} padding`],
    [3.3, `MegaBlocks: P = ${padded.rows.length} rows in blocks of ${block}; ${padded.rows.length - R} padding`],
    [6.6, `MoEBlaze: no buffer; R = ${R} indices into x`],
  ].map(([top, text]) => ({ x: 0, y: top - 0.35, text, anchor: "start", bold: true }));
  if (dropped.length) {
    said.push({ x: rows.length + 1 + dropped.length / 2, y: 1.5, text: "dropped", color: colors.dropped });
  }
  const width = Math.max(rows.length + dropped.length + 1, padded.rows.length, 24);
  return {
    box: [-0.2, -1, width + 0.2, 10],
    cells: strips.flatMap(({ cells }) => cells),
    texts: [...said, ...strips.flatMap(({ texts }) => texts)],
  };
}

// A row of cells in the colours of their experts: hatched if empty, without colour if crossed out or pale.
function strip(colors, top, values, owners, left = 0, look = "") {
  const cells = values.map((token, place) => {
    const edge = colors.experts[owners[place]];
    const face = token === EMPTY || look ? "#ffffff" : edge;
    const lines = { hatched: token === EMPTY, crossed: look === "crossed" && colors.dropped };
    const text = token === EMPTY ? "" : token;
    return { x: left + place + 0.06, y: top + 0.06, width: 0.88, height: 1, face, edge, text, ...lines };
  });
  const names = [...new Set(look === "crossed" ? [] : owners)].map((expert) => {
    const places = range(owners.length).filter((place) => owners[place] === expert);
    const middle = places.reduce((sum, place) => sum + place, 0) / places.length;
    return { x: left + middle + 0.5, y: top + 1.5, text: places.length > 1 ? `expert ${expert}` : `e${expert}` };
  });
  return { cells, texts: names };
}

// SVG -----------------------------------------------------------------------------------------------------------------

function add(parent, name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  parent.append(made);
}

// Draws cells and texts anew; the picture says its texts to those who do not see it.
function paint(svg, { box, cells, texts }) {
  svg.replaceChildren();
  svg.setAttribute("viewBox", box.join(" "));
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", texts.map(({ text }) => text).join(", "));
  svg.style.maxWidth = `${1.6 * box[2]}em`;
  const write = ({ x, y, text, anchor = "middle", bold, color = "black" }) => add(svg, "text", {
    x, y, fill: color, "text-anchor": anchor, "font-weight": bold ? "bold" : "normal" }, text);
  for (const { x, y, width, height, face, edge, text, hatched, crossed } of cells) {
    add(svg, "rect", { x, y, width, height, fill: face, stroke: edge });
    const down = y + height;
    if (hatched) add(svg, "path", { d: `M${x} ${y + 0.5}l.4-.5M${x} ${down}l${width}-1M${x + 0.5} ${down}l.38-.5`, stroke: edge });
    if (crossed) add(svg, "path", { d: `M${x} ${down}l${width}-1`, stroke: crossed });
    if (text !== "") write({ x: x + width / 2, y: y + height / 2, text });
  }
  texts.forEach(write);
}

// The page ------------------------------------------------------------------------------------------------------------

// The buttons: a row a token, a column an expert; a button shows the slot of its expert.
function buttonsOf({ choices, E }, colors, choose) {
  const table = document.createElement("div");
  table.className = "buttons";
  table.style.gridTemplateColumns = `5em repeat(${E}, 2.6em)`;
  const write = (text) => table.appendChild(document.createElement("span")).append(text);
  ["", ...range(E).map((expert) => `e${expert}`)].forEach(write);
  choices.forEach((chosen, token) => {
    write(`token ${token}`);
    for (const expert of range(E)) {
      const slot = chosen.indexOf(expert);
      const button = table.appendChild(document.createElement("button"));
      button.append(slot === EMPTY ? "" : slot);
      button.title = `token ${token} to expert ${expert}`;
      button.style.background = slot === EMPTY ? colors.pale : colors.experts[expert];
      button.addEventListener("click", () => choose(token, expert));
    }
  });
  return table;
}

for (const script of document.querySelectorAll("script.routing")) {
  const { controls, drawing, choices: start, draws, colors } = JSON.parse(script.textContent);
  const pictures = range(2).map(() => document.createElementNS("http://www.w3.org/2000/svg", "svg"));
  const grid = document.createElement("div");
  grid.className = "grid";
  const all = controls.map((data) => new Control(data, (moved) => (drawing.includes(moved.name) ? draw() : show())));
  const named = (name) => all.find((control) => control.name === name);
  const value = (name) => Number(named(name).labels[named(name).position]);
  let choices = start;

  function show() {
    const routed = dispatch(choices, value("experts"));
    grid.replaceChildren(buttonsOf(routed, colors, choose));
    paint(pictures[0], drawArrays(routed, colors));
    paint(pictures[1], drawBins(routed, value("capacity_factor"), value("block"), colors));
  }

  // Gives a token an expert in place of the one that it has had for longest.
  function choose(token, expert) {
    if (choices[token].includes(expert)) return;
    choices = choices.map((chosen, one) => (one === token ? [...chosen.slice(1), expert] : chosen));
    show();
    grid.querySelectorAll("button")[token * value("experts") + expert].focus(); // it is a new one
  }

  // Choices as the sliders ask for, by chance.
  function draw() {
    const k = named("k");
    k.input.max = Math.min(value("experts"), k.labels.length) - 1;
    k.position = k.position; // which the browser keeps below its maximum
    const drawn = draws[[value("tokens"), value("experts"), named("skew").position]];
    choices = drawn.map((chosen) => chosen.slice(0, value("k")));
    show();
  }

  const labels = (is) => all.filter(({ name }) => drawing.includes(name) === is).map(({ label }) => label);
  replaceNote(script, [...labels(true), grid, ...labels(false)]);
  script.nextElementSibling.replaceWith(...pictures);
  show();
}
