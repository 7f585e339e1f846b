/* How layers are folded: from their names in the order of the graph. Knows nothing of the page. */
const FOLDED = 40;

/* Modules: parts of names between / and . as a tree; chains of single children are one. `rows` are places in `names`, `first` is the least. */
function tree(names) {
  const opened = (name, first) => ({ name, first, children: new Map(), rows: [] });
  const root = opened("", 0);
  names.forEach((name, index) => {
    let node = root;
    for (const part of name.split(/[/.]+/).filter(Boolean).slice(0, -1)) {
      if (!node.children.has(part)) node.children.set(part, opened(part, index));
      node = node.children.get(part);
    }
    node.rows.push(index);
  });
  const squeeze = node => {
    const children = [...node.children.values()].map(squeeze);
    if (children.length === 1 && !node.rows.length && node !== root) return { ...children[0], name: node.name + "/" + children[0].name };
    return { ...node, ...inRuns(children, node.rows, names) };
  };
  return squeeze(root);
}

/* Where names tell of no modules, many stand side by side: runs of them in the order of the graph, as many as each has entries. */
function inRuns(children, rows, names) {
  const entries = [...children, ...rows.map(index => ({ name: names[index], first: index }))].sort((a, b) => a.first - b.first);
  if (entries.length <= FOLDED) return { children, rows };
  const count = Math.ceil(Math.sqrt(entries.length)), start = k => Math.floor((k * entries.length) / count);
  const runs = Array.from({ length: count }, (_, k) => {
    const run = entries.slice(start(k), start(k + 1));
    return { name: `${run[0].name} … ${run.at(-1).name}`, children: run.filter(one => one.children), rows: run.filter(one => !one.children).map(one => one.first) };
  });
  return { children: runs, rows: [] };
}
