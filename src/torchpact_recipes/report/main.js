// The page: what the data says, put into words, tiles, charts and a table.
"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
// What is no number in a run, as the loss of one that diverged, is null here.
const known = value => typeof value === "number" && Number.isFinite(value);
const fixed = (value, digits) => known(value) ? value.toFixed(digits) : "–";
const percent = (value, digits = 2) => known(value) ? `${(100 * value).toFixed(digits)} %` : "–";
const apart = points => (Math.abs(points) < 0.005 ? "As accurate as" : `${Math.abs(points).toFixed(2)} points ${points < 0 ? "below" : "above"}`);
const KINDS = { thresholded: "circle", plain: "circle", discrete: "triangle", relaxed: "diamond", act: "square" };
const MAIN = ["thresholded", "plain", "act", "discrete", "relaxed"];
const spoken = mode => mode === "act" ? "ACT" : mode;
const mainMode = run => run.method === "act" && run.results.act ? "act" : MAIN.find(m => run.results[m]) || Object.keys(run.results)[0];
let chosen = 0, viewer = null;

function tile(value, words, main = false) {
  return element("div", { className: `tile${main ? " main" : ""}` }, element("b", { textContent: value }), element("span", { textContent: words }));
}

// A title that does not break within "τ = 0.01".
const unbroken = title => title.split(/(\S+ = \S+|ResNet-\d+,?)/).map((part, i) => i % 2 ? element("span", { textContent: part }) : part);

function partner(run) {
  if (run.method === "plain" || run.units === null) return null;
  const plain = DATA.runs.filter(r => r.method === "plain" && r.units === run.units && r.results.plain && r.width === run.width);
  return plain.find(r => r.seed === run.seed) || plain[0] || null;
}

function onImages({ images: here }, { images: there }) {
  return known(here) && known(there) && here !== there ? `, measured on ${here.toLocaleString("en")} images and on ${there.toLocaleString("en")}` : "";
}

function headline() {
  const run = DATA.runs[chosen], mode = mainMode(run), found = run.results[mode], tiles = [];
  const plain = partner(run);
  if (found) {
    if (found.flops && run.plain_flops && run.method !== "plain")
      tiles.push(tile(percent(Math.abs(1 - found.flops / run.plain_flops), 0), `${found.flops <= run.plain_flops ? "fewer" : "more"} FLOPs than the plain network`, true));
    const against = plain ? `accuracy; plain ${percent(plain.results.plain.accuracy)}` : `accuracy${found.images ? `, ${found.images.toLocaleString("en")} images` : ""}`;
    tiles.push(run.text ? tile(fixed(found.bits_per_character, 3), "bits per character") : tile(percent(found.accuracy), against));
    const time = run.timing && run.timing.modes[mode];
    if (time && run.method !== "plain") tiles.push(tile(`${(run.timing.plain / time).toFixed(2)} ×`, `as fast as the same network run in full, ${run.timing.device}`));
    else if (time) tiles.push(tile(`${(1000 * time).toFixed(2)} ms`, `an image, ${run.timing.device}`));
    if (found.flops) tiles.push(tile((found.flops / 1e6).toFixed(1), "MFLOPs an image"));
  }
  if (run.status !== "finished") tiles.push(tile(percent(run.iteration / run.iterations, 0), `of training done (${run.iteration.toLocaleString("en")} iterations)`));
  document.getElementById("headline").replaceChildren(...tiles);
  document.getElementById("title").replaceChildren(...unbroken(run.title));
  const parts = [];
  if (found && plain && known(found.accuracy) && known(plain.results.plain.accuracy)) parts.push(`${apart(100 * (found.accuracy - plain.results.plain.accuracy))} the plain network it is compared with, in ${spoken(mode)} mode${onImages(found, plain.results.plain)}.`);
  else if (found) parts.push(mode === "plain" ? "Runs all of its units everywhere." : `Evaluated in ${spoken(mode)} mode.`);
  if (run.status !== "finished") parts.push("Still training, or interrupted: these are the newest numbers there are.");
  if (run.note) parts.push(run.note);
  document.getElementById("summary").textContent = parts.join(" ");
}

function points(value) {
  const found = [];
  DATA.runs.forEach((run, index) => {
    for (const [mode, m] of Object.entries(run.results)) {
      const x = value(run, mode, m);
      if (!known(x) || !known(m.accuracy)) continue;
      found.push({
        x, y: 100 * m.accuracy, kind: KINDS[mode] || "circle", hollow: mode === "plain", on: index === chosen,
        label: mode === mainMode(run) ? run.label : "", key: `${index} ${mode}`, choose: () => choose(index),
        tip: `${run.title}\n${mode}: ${percent(m.accuracy)}` + (m.flops ? `, ${(m.flops / 1e6).toFixed(1)} MFLOPs` : "") +
          (run.timing && run.timing.modes[mode] ? `\n${(1000 * run.timing.modes[mode]).toFixed(3)} ms an image` : ""),
      });
    }
  });
  return found;
}

function tradeoff() {
  const byFlops = points((run, mode, m) => m.flops ? m.flops / 1e6 : null);
  const byTime = points((run, mode) => run.timing && run.timing.modes[mode] ? 1000 * run.timing.modes[mode] : null);
  document.getElementById("tradeoff").hidden = !byFlops.length;
  if (byFlops.length) scatter(document.getElementById("by-flops"), byFlops, { xlabel: "MFLOPs an image" });
  document.getElementById("time-figure").hidden = !byTime.length;
  if (byTime.length) {
    const { device, batch } = DATA.runs.find(run => run.timing).timing;
    document.getElementById("time-caption").textContent = `by time, deployed on ${device}, ${batch} images at once`;
    scatter(document.getElementById("by-time"), byTime, { xlabel: "milliseconds an image" });
  }
  const modes = new Set(DATA.runs.flatMap(run => Object.keys(run.results)));
  const names = { plain: "○ plain", thresholded: "● thresholded", discrete: "▲ discrete", relaxed: "◆ relaxed", act: "■ ACT" };
  document.getElementById("legend").textContent = `Test accuracy in %. ${Object.keys(names).filter(m => modes.has(m)).map(m => names[m]).join("   ")}` +
    (unevenly() ? ". Not all were measured on as many images: see the table of runs." : "");
}

function training() {
  const lines = key => DATA.runs.map((run, index) => ({
    points: run.history.filter(e => e.kind === "train" && known(e[key])).map(e => [e.iteration, key === "accuracy" ? 100 * e[key] : e[key]]),
    on: index === chosen, label: DATA.runs.length > 1 ? run.label : "",
  }));
  curves(document.getElementById("curve-loss"), lines("loss"));
  const dots = DATA.runs.map((run, index) => ({
    points: run.history.filter(e => e.kind === "validate" && known(e.accuracy)).map(e => [e.iteration, 100 * e.accuracy]),
    on: index === chosen, dots: true,
  }));
  curves(document.getElementById("curve-accuracy"), [...lines("accuracy"), ...dots]);
  const run = DATA.runs[chosen], events = run.history.filter(e => e.kind === "train" && e.expected_steps && e.expected_steps.length);
  document.getElementById("steps-figure").hidden = !events.length;
  document.getElementById("steps-of").textContent = DATA.runs.filter(r => r.history.length).length > 1 ? `(${run.label})` : "";
  const blocks = events.length ? events[0].expected_steps.map((_, k) => ({
    points: events.map(e => [e.iteration, e.expected_steps[k]]).filter(p => known(p[1])), on: true, label: events[0].expected_steps.length > 1 ? `block ${k + 1}` : "",
  })) : [];
  if (blocks.length) curves(document.getElementById("curve-steps"), blocks);
  document.getElementById("training").hidden = !DATA.runs.some(run => run.history.length);
}

// Whether runs were measured on different numbers of images.
const unevenly = () => new Set(DATA.runs.flatMap(run => Object.values(run.results)).map(m => m.images).filter(known)).size > 1;

function table() {
  const measures = new Set(DATA.runs.map(run => run.text ? "bits per character" : "accuracy"));
  const measured = (run, m) => run.text ? fixed(m.bits_per_character, 3) + (measures.size > 1 ? " bits" : "") : percent(m.accuracy);
  const head = ["run", "mode", [...measures].join(" or "), "MFLOPs", "of plain", "ms an image", "units by block", "images", "seed", "status"];
  const numbers = new Set([2, 3, 4, 5, 7]), hidden = new Set([...DATA.runs.some(run => run.timing) ? [] : [5], ...unevenly() ? [] : [7]]);
  const cell = (kind, text, i) => element(kind, { textContent: text, className: numbers.has(i) ? "number" : "" });
  const rows = [element("tr", {}, ...head.map((text, i) => cell("th", text, i)).filter((_, i) => !hidden.has(i)))];
  DATA.runs.forEach((run, index) => {
    const modes = Object.entries(run.results);
    (modes.length ? modes : [["", null]]).forEach(([mode, m], first) => {
      const time = run.timing && run.timing.modes[mode], steps = m && m.steps != null && [m.steps].flat();
      const cells = ["", mode, m ? measured(run, m) : "", m && m.flops ? (m.flops / 1e6).toFixed(1) : "",
        m && m.flops && run.plain_flops ? percent(m.flops / run.plain_flops, 0) : "", time ? (1000 * time).toFixed(3) : "",
        steps ? steps.map(s => fixed(s, 2)).join("  ") || "all" : "", m && known(m.images) ? m.images.toLocaleString("en") : "", first ? "" : run.seed, first ? "" : run.status === "finished" ? "finished" : `${run.iteration} of ${run.iterations}`];
      const row = element("tr", { className: index === chosen ? "on" : "" }, ...cells.map((text, i) => cell("td", text, i)).filter((_, i) => !hidden.has(i)));
      if (!first) {
        const button = element("button", { type: "button", textContent: run.title, title: run.folder });
        button.dataset.key = index;
        button.addEventListener("click", () => choose(index));
        row.firstChild.append(button);
      }
      rows.push(row);
    });
  });
  document.getElementById("runs").replaceChildren(element("tbody", {}, ...rows));
  hintAtMore();
}

function hintAtMore() {
  const { scrollWidth, clientWidth } = document.getElementById("table");
  document.getElementById("table-hint").hidden = scrollWidth <= clientWidth;
}

function choose(index, fromViewer = false) {
  chosen = index;
  keepingFocus(render);
  if (viewer && !fromViewer) follow();
}

// Show the pictures of the chosen run; where it has none, say whose remain.
function follow() {
  const own = DATA.galleries.findIndex(g => g.run === chosen);
  if (own >= 0) viewer.network(own);
  else viewer.name(DATA.runs[chosen]);
}

// Drawing replaces marks and rows: the one that had the focus gives it to its successor.
function keepingFocus(draw) {
  const held = document.activeElement, { key } = held.dataset, host = held.closest("[id]");
  draw();
  if (key === undefined || held.isConnected) return;
  const successor = [...host.querySelectorAll("[data-key]")].find(e => e.dataset.key === key);
  if (successor) successor.focus({ preventScroll: true });
}

function render() { headline(); tradeoff(); training(); table(); }

function theme(name) {
  document.documentElement.dataset.theme = name;
  if (viewer) viewer.recolour();
}

const dark = window.matchMedia("(prefers-color-scheme: dark)");
theme(dark.matches ? "dark" : "light");
dark.addEventListener("change", e => theme(e.matches ? "dark" : "light"));
document.getElementById("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
chosen = DATA.chosen;
render();
if (DATA.galleries.length) {
  document.getElementById("gallery-section").hidden = false;
  viewer = new Viewer(DATA.galleries, DATA.galleries.map(g => DATA.runs[g.run].title), run => choose(run, true));
  follow();
}
let resized;
window.addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(() => { keepingFocus(() => { tradeoff(); training(); }); hintAtMore(); }, 100); });
document.getElementById("footer").textContent = DATA.footer;
document.documentElement.dataset.ready = "true";
