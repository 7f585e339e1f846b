"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const quiet = { displayModeBar: false, responsive: true };
const font = { family: "system-ui, Segoe UI, Roboto, Arial, sans-serif", size: 12, color: "#1d2733" };
const grid = "#e8edf2";

function shorten(name, length) {
  return name.length <= length ? name : "…" + name.slice(name.length - length + 1);
}

function drawLayers(layers) {
  if (!layers.length) return document.getElementById("layers").remove();
  const finite = layers.map(l => Number(l.sqnr)).filter(Number.isFinite);
  const longest = Math.max(1, ...finite);
  const value = l => (Number.isFinite(Number(l.sqnr)) ? Number(l.sqnr) : longest * 1.05);
  const worst = [...finite].sort((a, b) => a - b)[Math.min(10, Math.ceil(finite.length / 4)) - 1];
  const trace = {
    type: "bar", orientation: "h",
    y: layers.map((_, i) => i), x: layers.map(value),
    marker: { color: layers.map(l => (finite.length > 3 && value(l) <= worst ? "#2166ac" : "#92c5de")) },
    text: layers.map(l => (l.sqnr === "inf" || l.sqnr === Infinity ? "equal" : Number(l.sqnr).toFixed(1))),
    textposition: "outside", cliponaxis: false,
    customdata: layers.map(l => [l.name, l.op, l.tensor, l.cosine]),
    hovertemplate: "%{customdata[0]}<br>%{customdata[1]} → %{customdata[2]}<br>SQNR %{text} dB, cosine %{customdata[3]}<extra></extra>",
  };
  const layout = {
    font, height: 70 + 22 * layers.length, bargap: 0.25,
    margin: { l: 10, r: 50, t: 6, b: 44 },
    yaxis: {
      autorange: "reversed", automargin: true, showgrid: false, ticks: "outside", ticklen: 6, tickcolor: "rgba(0,0,0,0)",
      tickvals: layers.map((_, i) => i), ticktext: layers.map(l => l.op + "  " + shorten(l.name, 40)),
    },
    xaxis: { title: { text: "SQNR, dB" }, gridcolor: grid, zerolinecolor: "#b8c4d0" },
  };
  Plotly.newPlot("sqnr", [trace], layout, quiet);
}

function drawTensor(target, tensor) {
  const middle = tensor.counts.map((_, i) => (tensor.edges[i] + tensor.edges[i + 1]) / 2);
  const width = tensor.counts.map((_, i) => tensor.edges[i + 1] - tensor.edges[i]);
  const low = Number(tensor.low), high = Number(tensor.high);
  const outside = middle.map(x => x < low || x > high);
  const trace = {
    type: "bar", x: middle, y: tensor.counts, width,
    marker: { color: outside.map(o => (o ? "#d95f02" : "#4393c3")), line: { width: 0 } },
    hovertemplate: "%{x:.4g}: %{y}<extra></extra>",
  };
  const band = {
    type: "rect", xref: "x", yref: "paper", x0: low, x1: high, y0: 0, y1: 1,
    fillcolor: "rgba(67,147,195,0.12)", line: { width: 0 }, layer: "below",
  };
  const border = x => ({ type: "line", xref: "x", yref: "paper", x0: x, x1: x, y0: 0, y1: 1, line: { color: "#2166ac", width: 1.2 } });
  const from = Math.min(tensor.edges[0], low), to = Math.max(tensor.edges[tensor.edges.length - 1], high);
  const room = (to - from || 1) * 0.03;
  const layout = {
    font: { ...font, size: 11 }, bargap: 0, showlegend: false,
    margin: { l: 44, r: 8, t: 8, b: 24 },
    shapes: [band, border(low), border(high)],
    xaxis: { range: [from - room, to + room], gridcolor: grid, zeroline: false, nticks: 7 },
    yaxis: { type: "log", gridcolor: grid, exponentformat: "power", dtick: Math.max(...tensor.counts) > 2e3 ? 2 : 1, rangemode: "tozero" },
  };
  Plotly.newPlot(target, [trace], layout, quiet);
}

function card(tensor) {
  const box = document.createElement("div");
  box.className = "card";
  box.dataset.name = tensor.name.toLowerCase();
  const name = document.createElement("h3");
  const words = document.createElement("bdi");
  words.textContent = name.title = tensor.name;
  name.append(words);
  const about = document.createElement("p");
  const share = tensor.clipped ? (100 * tensor.clipped).toPrecision(2) + " % clipped" : "nothing clipped";
  about.textContent = tensor.format + ", " + Number(tensor.low).toPrecision(4) + " … " + Number(tensor.high).toPrecision(4) + ", " + share;
  const plot = document.createElement("div");
  plot.className = "plot";
  box.append(name, about, plot);
  return box;
}

function drawTensors(tensors) {
  if (!tensors.length) return document.getElementById("tensors").remove();
  const place = document.getElementById("grid");
  const seen = new IntersectionObserver(entries => {
    for (const entry of entries.filter(e => e.isIntersecting)) {
      seen.unobserve(entry.target);
      drawTensor(entry.target.querySelector(".plot"), entry.target.tensor);
    }
  }, { rootMargin: "600px" });
  for (const tensor of tensors) {
    const box = card(tensor);
    box.tensor = tensor;
    place.append(box);
    seen.observe(box);
  }
  document.getElementById("filter").addEventListener("input", event => {
    const wanted = event.target.value.toLowerCase();
    for (const box of place.children) box.style.display = box.dataset.name.includes(wanted) ? "" : "none";
  });
}

function drawScatter(scatter) {
  const section = document.createElement("section");
  const head = document.createElement("h2");
  head.textContent = scatter.title;
  const note = document.createElement("p");
  note.className = "note";
  note.textContent = "A point a trial. No trial beats those on the line in both; the filled one was taken.";
  const plot = document.createElement("div");
  section.append(head, note, plot);
  document.getElementById("charts").append(section);
  const dots = {
    type: "scatter", mode: "markers", showlegend: false,
    x: scatter.points.map(p => Number(p.x)), y: scatter.points.map(p => Number(p.y)), text: scatter.points.map(p => p.name),
    marker: { size: 11, color: scatter.points.map(p => (p.chosen ? "#2166ac" : "#ffffff")), line: { color: "#2166ac", width: 1.5 } },
    hovertemplate: "%{text}<br>%{x:.4g}, %{y:.4g}<extra></extra>",
  };
  const front = {
    type: "scatter", mode: "lines", showlegend: false, hoverinfo: "skip", line: { color: "#92c5de", width: 2 },
    x: scatter.front.map(p => Number(p.x)), y: scatter.front.map(p => Number(p.y)),
  };
  const axis = title => ({ title: { text: title }, gridcolor: grid, zeroline: false });
  const layout = { font, height: 380, margin: { l: 64, r: 20, t: 6, b: 48 }, xaxis: axis(scatter.cost), yaxis: axis(scatter.metric) };
  Plotly.newPlot(plot, [front, dots], layout, quiet);
}

function drawChart(chart) {
  const section = document.createElement("section");
  const title = document.createElement("h2");
  title.textContent = chart.title;
  const note = document.createElement("p");
  note.className = "note";
  note.textContent = chart.note;
  const plot = document.createElement("div");
  section.append(title, note, plot);
  document.getElementById("charts").append(section);
  const finite = chart.series.flatMap(s => s.values.map(Number)).filter(Number.isFinite);
  const longest = Math.max(1e-30, ...finite);
  const length = v => (v === "inf" ? longest * 1.05 : v === "nan" ? null : Number(v));
  const colors = ["#2166ac", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e", "#a6761d", "#666666"];
  const traces = chart.series.map((s, i) => ({
    type: "bar", orientation: "h", name: s.label, y: chart.names.map((_, k) => k), x: s.values.map(length),
    marker: { color: colors[i % colors.length] },
    text: s.values.map(v => (v === "inf" ? "equal" : v === "nan" ? "" : Number(v).toPrecision(3))),
    textposition: "outside", cliponaxis: false, customdata: chart.names,
    hovertemplate: "%{customdata}<br>" + s.label.replace(/[<>&]/g, "") + ": %{text}<extra></extra>",
  }));
  const layout = {
    font, height: 110 + (10 + 14 * traces.length) * chart.names.length, bargap: 0.2, barmode: "group",
    margin: { l: 10, r: 60, t: 30, b: 44 }, showlegend: traces.length > 1,
    legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", traceorder: "normal" },
    yaxis: {
      autorange: "reversed", automargin: true, showgrid: false,
      tickvals: chart.names.map((_, k) => k), ticktext: chart.names.map(n => shorten(n, 44).replace(/</g, "&lt;")),
    },
    xaxis: { title: { text: chart.axis }, gridcolor: grid, zerolinecolor: "#b8c4d0" },
  };
  Plotly.newPlot(plot, traces, layout, quiet);
}

data.charts.forEach(drawChart);
data.scatters.forEach(drawScatter);
drawLayers(data.layers);
drawTensors(data.tensors);
