// Small SVG charts with labels beside what they name. Nothing here knows of runs.
"use strict";
const SVG = "http://www.w3.org/2000/svg";

function node(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  for (const child of children) made.append(child);
  return made;
}

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function ticks(low, high, count = 5) {
  const span = high - low || Math.abs(high) || 1;
  const raw = span / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(k => k * power).find(k => k >= raw);
  const found = [];
  for (let k = Math.ceil(low / step); k <= Math.floor(high / step + 1e-9); k++) found.push(+(k * step).toPrecision(10));
  return found;
}

function padded(values, share = 0.08, least = 0) {
  const low = Math.min(...values), high = Math.max(...values);
  const room = Math.max((high - low) * share, least, (high - low) ? 0 : Math.abs(high) * 0.05 || 1);
  return [low - room, high + room];
}

const short = value => Math.abs(value) >= 10000 ? `${+(value / 1000).toFixed(1)}k` : String(+value.toPrecision(4));

// The frame of a chart: axes, and functions from values to places.
function frame(host, xs, ys, { xlabel = "", right = 14, shape = .62 } = {}) {
  const width = Math.max(260, host.clientWidth), height = Math.round(Math.max(200, Math.min(320, width * shape)));
  const box = { left: 46, right, top: 10, bottom: 40 };
  const x = v => box.left + (v - xs[0]) / (xs[1] - xs[0] || 1) * (width - box.left - box.right);
  const y = v => height - box.bottom - (v - ys[0]) / (ys[1] - ys[0] || 1) * (height - box.top - box.bottom);
  const svg = node("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  for (const t of ticks(...ys)) {
    svg.append(node("line", { class: "grid", x1: box.left, x2: width - box.right, y1: y(t), y2: y(t) }),
      node("text", { x: box.left - 8, y: y(t) + 4, "text-anchor": "end" }, short(t)));
  }
  for (const t of ticks(...xs)) svg.append(node("text", { x: x(t), y: height - box.bottom + 18, "text-anchor": "middle" }, short(t)));
  svg.append(node("text", { x: (box.left + width - box.right) / 2, y: height - 4, "text-anchor": "middle" }, xlabel));
  host.replaceChildren(svg);
  return { svg, x, y, box, width, height };
}

function symbol(kind, cx, cy, r = 5.5) {
  if (kind === "circle") return node("circle", { cx, cy, r });
  if (kind === "square") return node("rect", { x: cx - r + .5, y: cy - r + .5, width: 2 * r - 1, height: 2 * r - 1 });
  if (kind === "diamond") return node("path", { d: `M${cx} ${cy - r - 1}l${r + 1} ${r + 1}l${-r - 1} ${r + 1}l${-r - 1} ${-r - 1}z` });
  return node("path", { d: `M${cx} ${cy - r}l${r} ${2 * r - 1}h${-2 * r}z` });
}

// points: {x, y, kind, hollow, on, label, tip, key, choose}
function scatter(host, points, options) {
  const chart = frame(host, padded(points.map(p => p.x), .12), padded(points.map(p => p.y), .14, .1), options);
  const taken = points.map(p => [chart.x(p.x) - 8, chart.y(p.y) - 8, chart.x(p.x) + 8, chart.y(p.y) + 8]);
  for (const p of [...points].sort((a, b) => !!a.on - !!b.on)) {
    const cx = chart.x(p.x), cy = chart.y(p.y);
    const mark = symbol(p.kind, cx, cy);
    mark.setAttribute("class", `mark${p.on ? " on" : ""}${p.hollow ? " hollow" : ""}`);
    mark.setAttribute("stroke-width", "1.8");
    const group = node("g", { tabindex: "0", role: "button", "aria-label": p.tip.replace(/\n/g, ", "), "data-key": p.key }, mark);
    withTip(group, p.tip);
    if (p.choose) {
      group.addEventListener("click", p.choose);
      group.addEventListener("keydown", e => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); p.choose(); } });
    }
    chart.svg.append(group);
  }
  for (const p of points.filter(p => p.label).sort((a, b) => !!b.on - !!a.on)) {
    const text = node("text", { class: p.on ? "label" : "" }, p.label);
    chart.svg.append(text);
    const w = text.getComputedTextLength(), cx = chart.x(p.x), cy = chart.y(p.y);
    const places = [[12, 4], [-12 - w, 4], [-w / 2, -12], [-w / 2, 21], [10, -9], [10, 18], [-10 - w, -9], [-10 - w, 18]];
    const place = places.map(([dx, dy]) => [cx + dx, cy + dy]).find(([a, b]) => {
      const mine = [a, b - 11, a + w, b + 3];
      return a > chart.box.left - 20 && a + w < chart.width && b > 10 && b < chart.height - chart.box.bottom - 2 &&
        taken.every(t => mine[0] > t[2] || mine[2] < t[0] || mine[1] > t[3] || mine[3] < t[1]);
    });
    if (!place) { text.remove(); continue; }
    text.setAttribute("x", place[0]);
    text.setAttribute("y", place[1]);
    taken.push([place[0], place[1] - 11, place[0] + w, place[1] + 3]);
  }
}

// A label that is long goes on in a second line, after its first comma.
const inLines = label => label.length > 14 && label.includes(", ") ? [label.slice(0, label.indexOf(",")), label.slice(label.indexOf(",") + 2)] : [label];
const LETTER = 7, LINE = 13;
const meets = (a, b) => a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3];

// What of a chart a line covers, as small boxes.
function inked(places) {
  const found = [];
  places.forEach(([x, y], i) => {
    const [before, above] = places[Math.max(0, i - 1)], parts = Math.ceil(Math.hypot(x - before, y - above) / 4) || 1;
    for (let k = 1; k <= parts; k++) {
      const cx = before + (x - before) * k / parts, cy = above + (y - above) * k / parts;
      found.push([cx - 2, cy - 2, cx + 2, cy + 2]);
    }
  });
  return found;
}

// lines: {points: [[x, y]], on, dots, label}
function curves(host, lines, { ys, xlabel = "iteration" } = {}) {
  lines = lines.filter(line => line.points.length);
  if (!lines.length) { host.replaceChildren(element("p", { className: "note", textContent: "nothing logged yet" })); return; }
  const all = lines.flatMap(line => line.points);
  const xs = [0, Math.max(...all.map(p => p[0]))];
  const longest = Math.max(...lines.flatMap(line => inLines(line.label || "").map(part => part.length)));
  const chart = frame(host, xs, ys || padded(all.map(p => p[1])), { xlabel, right: 14 + LETTER * longest, shape: .75 });
  const ends = [], taken = [];
  for (const line of [...lines].sort((a, b) => !!a.on - !!b.on)) {
    const places = line.points.map(([a, b]) => [chart.x(a), chart.y(b)]);
    if (line.dots || places.length === 1) for (const [cx, cy] of places) {
      const dot = node("circle", { cx, cy, r: 3.2, class: `mark${line.on ? " on" : ""}` });
      chart.svg.append(dot);
      taken.push([cx - 4, cy - 4, cx + 4, cy + 4]);
    } else {
      chart.svg.append(node("path", { class: `line${line.on ? " on" : ""}`, d: "M" + places.map(p => p.map(v => v.toFixed(1)).join(" ")).join("L") }));
      taken.push(...inked(places));
    }
    if (line.label) ends.push({ x: places.at(-1)[0], y: places.at(-1)[1], line });
  }
  // first those in the margin, from above, which make room for each other; then those of shorter runs
  const margin = chart.width - chart.box.right - 2;
  ends.sort((a, b) => (a.x < margin) - (b.x < margin) || (ends.length <= 6 ? a.y - b.y : !!b.line.on - !!a.line.on));
  const reach = ends.length <= 6 ? 6 * LINE : LINE;
  const steps = Array.from({ length: Math.floor(reach / 3) + 1 }, (_, i) => 3 * i);
  // in the margin downwards first, which keeps the order of the lines
  const around = steps.flatMap(step => [step, -step]), below = [...steps, ...steps.map(step => -step)];
  const floor = chart.height - chart.box.bottom + 6;
  for (const end of ends) labelled(chart, end, taken, ...(end.x < margin ? [around, floor] : [below, chart.height]));
}

// Put a label beside the end of its line, or as near as it lies on nothing; else leave it out.
function labelled(chart, { x, y, line }, taken, shifts, floor) {
  const parts = inLines(line.label), w = LETTER * Math.max(...parts.map(part => part.length)), h = LINE * parts.length;
  for (const top of shifts.map(shift => y - LINE / 2 + shift)) {
    const mine = [x + 5, top, x + 5 + w, top + h];
    if (top < -6 || top + h > floor || taken.some(box => meets(mine, box))) continue;
    taken.push(mine);
    parts.forEach((part, i) => chart.svg.append(node("text", { x: x + 6, y: top + 10.5 + i * LINE, class: line.on ? "label" : "" }, part)));
    return;
  }
}

function withTip(target, text) {
  const tip = document.getElementById("tip");
  const show = () => {
    const at = target.getBoundingClientRect();
    tip.textContent = text;
    tip.hidden = false;
    const left = Math.min(at.left + at.width / 2 + 12, window.innerWidth - tip.offsetWidth - 8);
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${Math.max(8, at.top - tip.offsetHeight - 8)}px`;
  };
  const hide = () => { tip.hidden = true; };
  target.addEventListener("pointerenter", show);
  target.addEventListener("focus", show);
  target.addEventListener("pointerleave", hide);
  target.addEventListener("blur", hide);
}
