const data = JSON.parse(document.getElementById("data").textContent);
const several = data.models.length > 1;
const [ALONE, OWN, ACCUMULATED, COSINE, RESCALED] = [0, 1, 2, 3, 4];
const place = id => document.getElementById(id);
const layers = data.layers;
const byTensor = new Map(layers.map((layer, index) => [layer.t, index]));
const inDecibels = data.measure.unit === "dB";
const TOP = 20, RANGE = 60;

/* What a figure costs: larger is worse. Decibels become shares of the signal, whose errors add up. */
const cost = value => {
  const x = number(value);
  if (Number.isNaN(x)) return NaN;
  return inDecibels ? 10 ** (-x / 10) : data.measure.more ? -x : x;
};
const worst = (layer, column) => {
  const found = layer.m.map(m => (m ? (column === ALONE ? cost(m[column]) : -number(m[column])) : NaN)).filter(x => !Number.isNaN(x));
  return found.length ? Math.max(...found) : -Infinity;
};
const totals = data.models.map((_, k) => layers.reduce((sum, layer) => sum + (layer.m[k] ? Math.max(0, cost(layer.m[k][ALONE])) || 0 : 0), 0));
const largest = Math.max(1e-300, ...layers.flatMap(layer => layer.m.map((m, k) => (m ? share(m, k) : 0))));
const measured = layers.some(layer => layer.m.some(m => m && m[ALONE] !== null));
const accumulated = layers.some(layer => layer.m.some(m => m && !Number.isNaN(number(m[ACCUMULATED]))));

function share(figures, index) {
  const found = cost(figures[ALONE]);
  return Number.isNaN(found) ? 0 : inDecibels ? found / (totals[index] || 1) : Math.max(0, found);
}

function figure(value, unit) {
  const x = number(value);
  if (value === null || value === undefined || Number.isNaN(x)) return "–";
  if (x === Infinity) return "exact";
  return unit === "dB" ? x.toFixed(1) + " dB" : String(Number(x.toPrecision(4))) + (unit ? " " + unit : "");
}

function bars(layer, column) {
  const rows = layer.m.map((m, k) => {
    let width = 0, words = "–";
    if (m) {
      const x = number(m[column]);
      if (column === ALONE) {
        width = share(m, k) / largest;
        const part = inDecibels && Number.isFinite(x) ? ` · ${(100 * share(m, k)).toFixed(share(m, k) < 0.1 ? 1 : 0)} %` : "";
        words = figure(m[column], data.measure.unit) + part;
      } else {
        width = Number.isNaN(x) ? 0 : Math.min(1, Math.max(0, 1 - x / RANGE));
        words = figure(m[column], "dB") + (m[RESCALED] ? "*" : "");
      }
    }
    return make("span", { class: "bar", style: `--c: ${colour(k)}` }, make("i", { style: `width: ${(100 * width).toFixed(2)}%` }), make("u", {}, words));
  });
  return make("span", { class: column === ALONE ? "alone" : "accumulated" }, ...rows);
}

function nameOf(layer) {
  return make("span", { class: "name" }, make("bdi", { title: layer.n }, layer.n), make("span", { class: "op" }, layer.o));
}

function head() {
  return make("div", { class: "row head" }, make("span", { class: "name" }, "layer"),
    measured ? make("span", {}, inDecibels ? "alone, and its share" : data.measure.name + ", alone") : make("span"),
    accumulated ? make("span", {}, "accumulated") : make("span"));
}

function layerRow(index, depth) {
  const layer = layers[index];
  const row = make("button", { class: "row", type: "button", "aria-expanded": "false", "data-index": index, on: { click: () => toggle(row, index) } },
    nameOf(layer), measured ? bars(layer, ALONE) : make("span"), accumulated ? bars(layer, ACCUMULATED) : make("span"));
  if (depth) row.firstChild.style.paddingLeft = 16 * depth + "px";
  return row;
}

function toggle(row, index) {
  const open = row.nextElementSibling;
  if (open && open.classList.contains("detail")) {
    open.remove();
    row.setAttribute("aria-expanded", "false");
  } else {
    row.after(detail(index));
    row.setAttribute("aria-expanded", "true");
  }
}

function legend() {
  if (!several) return null;
  return make("div", { class: "legend" }, ...data.models.map((name, k) => make("span", { style: `--c: ${colour(k)}` }, name)));
}

function reasonsOf(index, name) {
  const found = data.reasons[index][name];
  return found === undefined ? null : data.words[found];
}

function links(title, tensors) {
  if (!tensors || !tensors.length) return null;
  const chips = tensors.map(name => {
    const at = byTensor.get(name);
    return at === undefined ? make("span", {}, name + " ") : make("button", { type: "button", on: { click: () => show(at) } }, layers[at].n);
  });
  return make("p", { class: "links" }, make("span", { class: "label" }, title + " "), ...chips);
}

function detail(index) {
  const layer = layers[index], box = make("div", { class: "detail" });
  box.append(make("h3", {}, layer.n + "  (" + layer.o + ")"));
  layer.m.forEach((m, k) => {
    if (!m) return;
    const said = [measured ? `alone ${figure(m[ALONE], data.measure.unit)}` : "", m[OWN] === null ? "" : `own ${figure(m[OWN], "dB")}`,
      Number.isNaN(number(m[ACCUMULATED])) ? "" : `accumulated ${figure(m[ACCUMULATED], "dB")}, cosine ${m[COSINE]}`,
      m[RESCALED] ? "rescaled per channel (undone here)" : ""].filter(Boolean).join("; ");
    box.append(make("p", {}, make("span", { class: "label" }, (several ? data.models[k] + ": " : "") + said)));
    for (const name of new Set([layer.n, layer.t, layer.w])) {
      const why = name && reasonsOf(k, name);
      if (why) box.append(make("p", {}, why));
    }
  });
  box.append(...[links("reads", layer.r), links("feeds", layer.f)].filter(Boolean));
  const plots = make("div", { class: "plots" });
  for (const name of new Set([layer.t, layer.w])) if (name && data.tensors[name]) plots.append(...tensorCards(name));
  if (plots.children.length) box.append(plots);
  return box;
}

/* What a model leaves out of an entry is as in the entry before it. */
function filled(entries) {
  let before = {};
  return entries.map(entry => {
    if (entry) before = { ...before, note: undefined, ...entry };
    return entry ? before : null;
  });
}

function tensorCards(name) {
  const entries = filled(data.tensors[name]), first = entries.find(Boolean), cards = [];
  const card = make("div", { class: "card", "data-name": name.toLowerCase() }, make("h3", {}, name));
  entries.forEach((entry, k) => {
    if (!entry) return;
    const clipped = number(entry.clipped) ? (100 * number(entry.clipped)).toPrecision(2) + " % clipped" : "nothing clipped";
    const limits = Number.isNaN(number(entry.low)) ? "" : `, ${short(entry.low)} … ${short(entry.high)}, ${clipped}`;
    card.append(make("p", { style: several ? `color: ${colour(k)}` : "" }, entry.format + limits + (entry.note ? "; " + entry.note : "")));
  });
  card.append(histogram(first, entries));
  cards.push(card);
  if (first.channels) {
    const each = first.channels.each > 1 ? `, ${first.channels.each} a column` : "";
    const ranged = entries.map(entry => (entry && entry.channels && entry.channels.low ? entry.channels : null));
    cards.push(make("div", { class: "card" }, make("h3", {}, "Channels of " + name),
      make("p", {}, `values of ${first.channels.of} channels${each}; lines: what their codes can express`), channelPlot(first.channels, ranged)));
  }
  return cards;
}

const everyRow = node => [...node.rows, ...node.children.flatMap(everyRow)];

function moduleRow(node, depth, order) {
  const inside = everyRow(node), box = make("div");
  const column = order === "accumulated" ? ACCUMULATED : ALONE;
  const count = make("span", { class: "op" }, inside.length + (inside.length === 1 ? " layer" : " layers"));
  const twisty = make("span", { class: "twisty" }, "▸");
  const parts = data.models.map((_, k) => inside.reduce((sum, i) => sum + (layers[i].m[k] ? share(layers[i].m[k], k) : 0), 0));
  const sums = make("span", {}, ...parts.map((part, k) => make("span", { class: "bar", style: `--c: ${colour(k)}` },
    make("i", { style: `width: ${(100 * Math.min(1, part / (inDecibels ? 1 : largest * inside.length))).toFixed(2)}%` }), make("u", {}, inDecibels ? (100 * part).toFixed(part < 0.1 ? 1 : 0) + " %" : ""))));
  const lows = data.models.map((_, k) => Math.min(...inside.map(i => (layers[i].m[k] ? number(layers[i].m[k][ACCUMULATED]) : NaN)).filter(x => !Number.isNaN(x))));
  const least = make("span", {}, ...lows.map(x => make("span", { class: "bar" }, make("i"), make("u", {}, Number.isFinite(x) ? "least " + figure(x, "dB") : "–"))));
  const row = make("button", { class: "row module", type: "button", "aria-expanded": "false", on: { click: () => {
    const open = row.getAttribute("aria-expanded") === "true";
    row.setAttribute("aria-expanded", String(!open));
    twisty.textContent = open ? "▸" : "▾";
    if (open) while (box.children.length > 1) box.lastChild.remove();
    else box.append(...branch(node, depth + 1, order));
  } } }, make("span", { class: "name" }, twisty, make("bdi", { title: node.name }, node.name || "model"), count), measured ? sums : make("span"), accumulated ? least : make("span"));
  row.firstChild.style.paddingLeft = 16 * depth + "px";
  row.dataset.worst = Math.max(...inside.map(i => worst(layers[i], column)));
  box.append(row);
  return box;
}

function sorted(indices, order) {
  if (order === "graph") return indices;
  const column = order === "accumulated" ? ACCUMULATED : order === "own" ? OWN : ALONE;
  return [...indices].sort((a, b) => worst(layers[b], column) - worst(layers[a], column) || a - b);
}

function branch(node, depth, order) {
  const modules = node.children.map(child => moduleRow(child, depth, order));
  if (order !== "graph") modules.sort((a, b) => Number(b.firstChild.dataset.worst) - Number(a.firstChild.dataset.worst));
  return [...modules, ...sorted(node.rows, order).map(index => layerRow(index, depth))];
}

let refresh = () => {};

function drawLayers() {
  if (!layers.length) return;
  const ops = [...new Set(layers.map(layer => layer.o))].sort();
  const search = make("input", { type: "search", placeholder: "Name or operator contains …", "aria-label": "Search layers", id: "search" });
  const op = make("select", { "aria-label": "Operator", id: "operator" }, make("option", { value: "" }, "all operators"), ...ops.map(one => make("option", { value: one }, one)));
  const orders = [["graph", "order of the graph"], ...(measured ? [["alone", "worst alone first"], ["own", "worst own first"]] : []), ...(accumulated ? [["accumulated", "worst accumulated first"]] : [])];
  const order = make("select", { "aria-label": "Order", id: "order" }, ...orders.map(([key, words]) => make("option", { value: key }, words)));
  const fold = make("input", { type: "checkbox", id: "fold" });
  const count = make("output", {}), list = make("div", { id: "list" });
  const whole = tree(layers.map(layer => layer.n));
  fold.checked = layers.length > FOLDED;
  refresh = () => {
    const wanted = search.value.toLowerCase();
    const fits = index => (!op.value || layers[index].o === op.value) && (!wanted || [layers[index].n, layers[index].t, layers[index].o].join(" ").toLowerCase().includes(wanted));
    const shown = layers.map((_, k) => k).filter(fits);
    const rows = fold.checked && !wanted && !op.value ? branch(whole, 0, order.value) : sorted(shown, order.value).map(index => layerRow(index, 0));
    list.replaceChildren(head(), ...rows);
    count.textContent = shown.length === layers.length ? `${layers.length} layers` : `${shown.length} of ${layers.length} layers`;
  };
  for (const control of [search, op, order, fold]) control.addEventListener("input", () => refresh());
  const starred = layers.some(layer => layer.m.some(m => m && m[RESCALED])) ? " * the quantized model holds this tensor times a scale per channel; it was undone first." : "";
  const how = accumulated ? "Accumulated: how far a layer's output is from the float model's, with the errors of all layers before it." + starred + " Longer bars are worse. Click a layer for its values, weights and neighbours." : "Longer bars are worse.";
  place("layers").append(make("h2", {}, "All layers"), make("p", { class: "note" }, how),
    make("div", { class: "controls" }, search, op, order, make("label", {}, fold, "fold"), count), ...[legend()].filter(Boolean), list);
  refresh();
}

function show(index) {
  place("search").value = layers[index].n;
  place("operator").value = "";
  refresh();
  const row = place("list").querySelector(`[data-index="${index}"]`);
  if (row.getAttribute("aria-expanded") === "false") toggle(row, index);
  row.scrollIntoView({ block: "start", behavior: "smooth" });
}

function drawCauses() {
  if (!measured) return;
  const ranked = sorted(layers.map((_, k) => k), "alone").filter(k => worst(layers[k], ALONE) > (inDecibels ? 0 : -Infinity)).slice(0, TOP);
  const title = !ranked.length ? "No layer causes a loss at the outputs" : ranked.length < layers.length ? `The ${ranked.length} layers that cause the loss` : "The layers that cause the loss";
  place("causes").append(make("h2", {}, title), ...data.notes.map(note => make("p", { class: "note" }, note)), ...[legend()].filter(Boolean), ...(ranked.length ? [head()] : []), ...ranked.map(index => layerRow(index, 0)));
}

function answerOf(answer, example, index) {
  if (answer.picture) return make("img", { src: answer.picture, alt: "" });
  if (example.kind === "boxes") {
    const svg = draw("svg", { viewBox: "0 0 1 1", preserveAspectRatio: "none" });
    for (const [x1, y1, x2, y2, score, kind] of answer.boxes) {
      const rect = draw("rect", { x: x1, y: y1, width: Math.max(0, x2 - x1), height: Math.max(0, y2 - y1), "vector-effect": "non-scaling-stroke", style: `fill: none; stroke: ${index ? colour(index - 1) : "#111"}; stroke-width: 2` });
      const title = draw("title");
      title.textContent = `class ${kind}, score ${score}`;
      rect.append(title);
      svg.append(rect);
    }
    const boxed = make("div", { class: "boxed" }, example.picture ? make("img", { src: example.picture, alt: "" }) : make("div", { style: "aspect-ratio: 1; background: var(--hover)" }), svg);
    return make("div", {}, boxed, make("p", {}, answer.boxes.length + (answer.boxes.length === 1 ? " box" : " boxes")));
  }
  const before = new Map(example.answers[0].classes.map(([kind], rank) => [kind, rank]));
  return make("div", {}, ...answer.classes.map(([kind, score], rank) => make("div", { class: "class" + (index && rank === 0 && before.get(kind) !== 0 ? " moved" : ""), style: `--c: ${index ? colour(index - 1) : "var(--faint)"}` },
    make("span", {}, "class " + kind), make("i", { style: `width: ${100 * Math.max(0, Math.min(1, score))}%` }), make("u", { style: "text-decoration: none" }, (100 * score).toFixed(1) + " %"))));
}

function drawExamples() {
  if (!data.examples.length) return;
  place("examples").append(make("h2", {}, "Outputs before and after"));
  for (const example of data.examples) {
    const row = make("div", { class: "examples" });
    if (example.picture && example.kind !== "boxes") row.append(make("div", { class: "card" }, make("h3", {}, `sample ${example.sample}`), make("img", { src: example.picture, alt: "" })));
    example.answers.forEach((answer, k) => {
      const name = k ? (several ? data.models[k - 1] : "quantized") : "float";
      row.append(make("div", { class: "card" }, make("h3", {}, name), make("p", {}, `${example.output}, sample ${example.sample}`), answerOf(answer, example, k)));
    });
    place("examples").append(row);
  }
}

/* Tensors that no layer leads to: pages of histograms only. Drawn when they come into sight. */
function drawTensors() {
  const names = Object.keys(data.tensors);
  if (layers.length || !names.length) return;
  const grid = make("div", { class: "plots" }), search = make("input", { type: "search", id: "search", placeholder: "Name contains …", "aria-label": "Search tensors" });
  const seen = new IntersectionObserver(entries => {
    for (const entry of entries.filter(e => e.isIntersecting)) {
      seen.unobserve(entry.target);
      entry.target.append(...tensorCards(entry.target.dataset.tensor));
    }
  }, { rootMargin: "600px" });
  for (const name of names) {
    const holder = make("div", { "data-tensor": name, style: "min-height: 190px" });
    grid.append(holder);
    seen.observe(holder);
  }
  search.addEventListener("input", () => {
    for (const holder of grid.children) holder.hidden = !holder.dataset.tensor.toLowerCase().includes(search.value.toLowerCase());
  });
  place("tensors").append(make("h2", {}, "Values, tensor by tensor"), make("p", { class: "note" }, "Counts are logarithmic. The shaded band is what the codes can express; values outside it, in orange, are clipped."), make("div", { class: "controls" }, search), grid);
}

for (const scatter of data.scatters) {
  place("scatters").append(make("div", { class: "card" }, make("h2", {}, scatter.title),
    make("p", { class: "note" }, `A point a trial: ${scatter.metric} by ${scatter.cost}. No trial beats those on the line in both; the filled one was taken.`), scatterPlot(scatter)));
}
drawCauses();
drawLayers();
drawExamples();
drawTensors();
