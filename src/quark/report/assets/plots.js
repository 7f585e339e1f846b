"use strict";
/* Small plots as SVG. Text is set as text nodes only: names come from models. */
const NS = "http://www.w3.org/2000/svg";

function make(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "style") node.style.cssText = value;
    else if (key === "on") for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
    else if (value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.filter(child => child !== null && child !== undefined));
  return node;
}

function draw(tag, attributes, ...children) {
  const node = document.createElementNS(NS, tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "style") node.style.cssText = value;
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

const colour = index => "var(--m" + Math.min(index, 5) + ")";
const number = value => (value === null || value === undefined ? NaN : value === "inf" ? Infinity : value === "-inf" ? -Infinity : Number(value));

function short(value) {
  const x = number(value);
  if (!Number.isFinite(x)) return String(x);
  return Math.abs(x) >= 1e5 || (x !== 0 && Math.abs(x) < 1e-3) ? x.toExponential(1) : String(Number(x.toPrecision(3)));
}

function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(k => k * power).find(k => k >= rough * 0.999);
  const found = [];
  for (let k = Math.ceil(low / step); k * step <= high + step * 1e-9; k++) found.push(k * step);
  return found;
}

/* A frame with axes: returns the drawing and the two scales. */
function frame(width, height, x, y, left) {
  const box = { l: left, r: 10, t: 8, b: 22 };
  const across = value => box.l + ((value - x[0]) / (x[1] - x[0] || 1)) * (width - box.l - box.r);
  const up = value => height - box.b - ((value - y[0]) / (y[1] - y[0] || 1)) * (height - box.t - box.b);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  return { svg, across, up, box, bottom: height - box.b, width, height };
}

function label(plot, x, y, words, anchor) {
  const text = draw("text", { x, y, "text-anchor": anchor });
  text.textContent = words;
  plot.svg.append(text);
}

function line(plot, x1, y1, x2, y2, style) {
  plot.svg.append(draw("line", { x1, y1, x2, y2, style }));
}

/* Histogram with logarithmic counts; entries: per model {low, high} or null. */
function histogram(shape, entries) {
  const [from, to] = shape.span.map(number);
  const ends = entries.flatMap(e => (e ? [number(e.low), number(e.high)] : [])).filter(Number.isFinite);
  const low = Math.min(from, ...ends), high = Math.max(to, ...ends), room = (high - low || 1) * 0.03;
  const top = Math.log10(Math.max(2, ...shape.counts) + 1);
  const plot = frame(360, 150, [low - room, high + room], [0, top], 34);
  const whole = entries.filter(Boolean).length === 1 ? entries.find(Boolean) : null;
  if (whole && Number.isFinite(number(whole.low)) && Number.isFinite(number(whole.high))) {
    const a = plot.across(number(whole.low)), b = plot.across(number(whole.high));
    plot.svg.append(draw("rect", { x: a, y: plot.box.t, width: Math.max(0, b - a), height: plot.bottom - plot.box.t, style: "fill: var(--m0); opacity: .1" }));
  }
  for (let power = 0; power <= top; power += top > 4 ? 2 : 1) {
    const y = plot.up(Math.log10(10 ** power + 1));
    line(plot, plot.box.l, y, plot.width - plot.box.r, y, "stroke: var(--line)");
    label(plot, plot.box.l - 5, y + 4, power < 4 ? String(10 ** power) : "1e" + power, "end");
  }
  const width = (to - from) / shape.counts.length;
  shape.counts.forEach((count, k) => {
    if (!count) return;
    const middle = from + (k + 0.5) * width;
    const clipped = whole && (middle < number(whole.low) || middle > number(whole.high));
    const x = plot.across(from + k * width), y = plot.up(Math.log10(count + 1));
    const bar = draw("rect", { x, y, width: Math.max(0.8, plot.across(from + (k + 1) * width) - x - 0.4), height: plot.bottom - y, style: `fill: ${clipped ? "var(--m1)" : "var(--faint)"}` });
    const title = draw("title");
    title.textContent = short(middle) + ": " + count;
    bar.append(title);
    plot.svg.append(bar);
  });
  entries.forEach((entry, index) => {
    for (const end of entry ? [number(entry.low), number(entry.high)] : []) {
      if (Number.isFinite(end)) line(plot, plot.across(end), plot.box.t, plot.across(end), plot.bottom, `stroke: ${colour(index)}; stroke-width: 1.6`);
    }
  });
  for (const x of ticks(low, high, 5)) label(plot, plot.across(x), plot.height - 6, short(x), "middle");
  return plot.svg;
}

/* Ranges of the channels of a weight, and the limits of the codes of each model. */
function channelPlot(shape, limits) {
  const lowest = shape.lowest.map(number), highest = shape.highest.map(number);
  const ends = limits.flatMap(one => (one ? [...one.low.map(number), ...one.high.map(number)] : [])).filter(Number.isFinite);
  const bottom = Math.min(0, ...lowest, ...ends), top = Math.max(0, ...highest, ...ends);
  const plot = frame(360, 150, [0, lowest.length], [bottom, top || 1], 44);
  for (const y of ticks(bottom, top || 1, 4)) {
    line(plot, plot.box.l, plot.up(y), plot.width - plot.box.r, plot.up(y), "stroke: var(--line)");
    label(plot, plot.box.l - 5, plot.up(y) + 4, short(y), "end");
  }
  lowest.forEach((low, k) => {
    const x = plot.across(k + 0.12), y = plot.up(highest[k]);
    const bar = draw("rect", { x, y, width: Math.max(0.8, plot.across(k + 0.88) - x), height: Math.max(1, plot.up(low) - y), style: "fill: var(--faint)" });
    const title = draw("title");
    title.textContent = `channel ${k * shape.each}${shape.each > 1 ? " to " + Math.min(shape.of, (k + 1) * shape.each) : ""}: ${short(low)} … ${short(highest[k])}`;
    bar.append(title);
    plot.svg.append(bar);
  });
  limits.forEach((one, index) => {
    for (const side of one ? [one.low, one.high] : []) {
      const points = side.flatMap((value, k) => [k, k + 1].map(x => plot.across(x) + "," + plot.up(number(value))));
      plot.svg.append(draw("polyline", { points: points.join(" "), style: `fill: none; stroke: ${colour(index)}; stroke-width: 1.4` }));
    }
  });
  for (const x of ticks(0, shape.of, 5)) label(plot, plot.across(x / shape.each), plot.height - 6, String(x), "middle");
  return plot.svg;
}

function scatterPlot(scatter) {
  const xs = scatter.points.map(p => p.x), ys = scatter.points.map(p => p.y);
  const spread = values => {
    const low = Math.min(...values), high = Math.max(...values), room = (high - low || Math.abs(high) || 1) * 0.08;
    return [low - room, high + room];
  };
  const plot = frame(520, 260, spread(xs), spread(ys), 48);
  for (const y of ticks(...spread(ys), 5)) {
    line(plot, plot.box.l, plot.up(y), plot.width - plot.box.r, plot.up(y), "stroke: var(--line)");
    label(plot, plot.box.l - 6, plot.up(y) + 4, short(y), "end");
  }
  for (const x of ticks(...spread(xs), 7)) label(plot, plot.across(x), plot.height - 6, short(x), "middle");
  const points = scatter.front.map(p => plot.across(p.x) + "," + plot.up(p.y)).join(" ");
  plot.svg.append(draw("polyline", { points, style: "fill: none; stroke: var(--m0); opacity: .5; stroke-width: 2" }));
  for (const one of scatter.points) {
    const dot = draw("circle", { cx: plot.across(one.x), cy: plot.up(one.y), r: 5.5, style: `fill: ${one.chosen ? "var(--m0)" : "var(--paper)"}; stroke: var(--m0); stroke-width: 1.5` });
    const title = draw("title");
    title.textContent = `${one.name}: ${short(one.x)}, ${short(one.y)}`;
    dot.append(title);
    plot.svg.append(dot);
  }
  return plot.svg;
}
