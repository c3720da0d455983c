// Images, the positions that are active in a unit, and the halting probabilities under the pointer.
"use strict";
const bytes = text => Uint8Array.from(atob(text), c => c.charCodeAt(0));
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function channels(hex) {
  const n = parseInt(hex.slice(1), 16);
  return [n >> 16, n >> 8 & 255, n & 255];
}

function picture(image) {
  const [height, width] = image.size, rgb = bytes(image.pixels), plane = height * width;
  const made = element("canvas", { width, height }), context = made.getContext("2d");
  const data = context.createImageData(width, height);
  for (let i = 0; i < plane; i++) data.data.set([rgb[i], rgb[plane + i], rgb[2 * plane + i], 255], 4 * i);
  context.putImageData(data, 0, 0);
  return made;
}

// Units run at each place, added over blocks: from quiet, for the least of all images, to the accent.
function heat(gallery, image) {
  const [height, width] = image.size;
  const made = element("canvas", { width, height }), context = made.getContext("2d");
  const data = context.createImageData(width, height);
  const low = channels(colour("--well")), high = channels(colour("--accent"));
  const blocks = image.blocks.map((block, k) => ({ steps: bytes(block.steps), size: gallery.sizes[k] }));
  const [least, most] = gallery.range;
  for (let r = 0; r < height; r++) for (let c = 0; c < width; c++) {
    const total = blocks.reduce((sum, { steps, size: [h, w] }) =>
      sum + steps[Math.floor(r * h / height) * w + Math.floor(c * w / width)], 0);
    const share = (total - least) / (most - least || 1);
    data.data.set([...low.map((v, i) => v + (high[i] - v) * share), 255], 4 * (r * width + c));
  }
  context.putImageData(data, 0, 0);
  return made;
}

// Stripes, which no image has: a halted position can be told by them however bright it is.
function hatching(context) {
  const side = 8, tile = element("canvas", { width: side, height: side }), brush = tile.getContext("2d");
  brush.strokeStyle = colour("--hatch");
  brush.lineWidth = 1.6;
  brush.beginPath();
  for (const from of [-side, 0, side]) { brush.moveTo(from - 1, side + 1); brush.lineTo(from + side + 1, -1); }
  brush.stroke();
  return context.createPattern(tile, "repeat");
}

class Viewer {
  constructor(galleries, titles, onNetwork) {
    this.galleries = galleries;
    this.titles = titles;
    this.position = null;
    this.stage = document.getElementById("stage");
    this.slider = document.getElementById("unit");
    const select = document.getElementById("network");
    galleries.forEach((g, i) => select.append(element("option", { value: i, textContent: titles[i] })));
    document.getElementById("network-label").hidden = galleries.length < 2;
    select.addEventListener("change", () => { this.network(+select.value); onNetwork(galleries[+select.value].run); });
    this.select = select;
    this.slider.addEventListener("input", () => { this.stop(); this.unit = +this.slider.value; this.draw(); });
    this.stage.addEventListener("pointermove", e => this.point(e));
    this.stage.addEventListener("pointerdown", e => this.point(e));
    // a finger that is lifted leaves, too: what it asked for remains
    this.stage.addEventListener("pointerleave", e => { if (e.pointerType !== "touch") { this.position = null; this.draw(); } });
    this.stage.addEventListener("keydown", e => this.key(e));
    document.getElementById("play").addEventListener("click", () => this.timer ? this.stop() : this.play());
    this.network(0);
  }

  network(index) {
    this.gallery = this.galleries[index];
    this.position = null;
    this.name();
    this.select.value = index;
    this.slider.max = this.gallery.units;
    const row = document.getElementById("blocks");
    row.replaceChildren(...this.gallery.sizes.map(([h, w], k) => {
      const button = element("button", { type: "button", textContent: `Block ${k + 1}` });
      button.title = `${h}×${w} positions`;
      button.addEventListener("click", () => { this.block = k; this.position = null; this.draw(); });
      return button;
    }));
    this.thumbs = [];
    for (const kind of ["hardest", "easiest"]) {
      const host = document.getElementById(kind);
      host.replaceChildren(...this.gallery.images.filter(i => i.kind === kind).map(image => this.thumb(image)));
    }
    this.show(this.telling());
  }

  // Whose pictures these are, and why, where another run is chosen that has none.
  name(other = null) {
    const title = this.titles[this.galleries.indexOf(this.gallery)];
    const why = other && (other.method === "plain" ? "A plain network computes everywhere; " : `There are no pictures of ${other.title}; `);
    document.getElementById("gallery-of").replaceChildren(why ? `${why}these are of ` : "Of ", element("b", { textContent: title }), ".");
  }

  // The same in the colours that now hold.
  recolour() {
    for (const [button, image] of this.thumbs) button.firstChild.lastChild.replaceWith(heat(this.gallery, image));
    this.draw();
  }

  // Begin where there is most to see: an image, a block and a unit with about two fifths of it active.
  telling() {
    let best = { miss: Infinity };
    for (const image of this.gallery.images) image.blocks.forEach((block, k) => {
      const steps = bytes(block.steps);
      if (steps.length < 64) return;
      for (let unit = 2; unit <= this.gallery.units; unit++) {
        const miss = Math.abs(steps.reduce((n, s) => n + (s >= unit), 0) / steps.length - .4);
        if (miss < best.miss - .02) best = { miss, image, block: k, unit };
      }
    });
    this.block = best.block || 0;
    this.unit = best.unit || 1;
    return best.image || this.gallery.images[0];
  }

  thumb(image) {
    const right = image.predicted === image.label;
    const says = right ? image.label : `${image.label}, taken for ${image.predicted}`;
    const button = element("button", { type: "button", title: says },
      element("div", { className: "pair" }, picture(image), heat(this.gallery, image)),
      element("small", { textContent: right ? image.label : `${image.label} ✗ ${image.predicted}` }),
      element("small", { textContent: `${image.mflops.toFixed(0)} M` }));
    button.addEventListener("click", () => this.show(image));
    this.thumbs.push([button, image]);
    return button;
  }

  show(image) {
    this.image = image;
    this.raster = picture(image);
    this.steps = image.blocks.map(block => bytes(block.steps));
    this.probs = image.blocks.map(block => bytes(block.probs));
    for (const [button, other] of this.thumbs) button.setAttribute("aria-pressed", other === image);
    this.draw();
  }

  point(event) {
    const at = this.stage.getBoundingClientRect(), [h, w] = this.gallery.sizes[this.block];
    const row = Math.floor((event.clientY - at.top) / at.height * h), column = Math.floor((event.clientX - at.left) / at.width * w);
    this.position = [Math.min(h - 1, Math.max(0, row)), Math.min(w - 1, Math.max(0, column))];
    this.draw();
  }

  key(event) {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move) return;
    event.preventDefault();
    const [h, w] = this.gallery.sizes[this.block];
    const [row, column] = this.position || [h >> 1, w >> 1];
    this.position = [Math.min(h - 1, Math.max(0, row + move[0])), Math.min(w - 1, Math.max(0, column + move[1]))];
    this.draw();
  }

  play() {
    document.getElementById("play").textContent = "Pause";
    this.timer = setInterval(() => { this.unit = this.unit % this.gallery.units + 1; this.draw(); }, 700);
  }

  stop() {
    clearInterval(this.timer);
    this.timer = null;
    document.getElementById("play").textContent = "Play";
  }

  draw() {
    const [h, w] = this.gallery.sizes[this.block], steps = this.steps[this.block];
    const size = this.stage.width, context = this.stage.getContext("2d");
    context.imageSmoothingEnabled = false;
    context.drawImage(this.raster, 0, 0, size, size);
    const fade = colour("--halted"), hatch = hatching(context);
    let active = 0;
    for (let i = 0; i < h * w; i++) {
      if (steps[i] >= this.unit) { active++; continue; }
      const top = Math.round(Math.floor(i / w) * size / h), left = Math.round(i % w * size / w);
      const place = [left, top, Math.round((i % w + 1) * size / w) - left, Math.round((Math.floor(i / w) + 1) * size / h) - top];
      context.globalAlpha = .8;
      context.fillStyle = fade;
      context.fillRect(...place);
      context.globalAlpha = 1;
      context.fillStyle = hatch;
      context.fillRect(...place);
    }
    if (this.position) {
      context.strokeStyle = colour("--accent");
      context.lineWidth = 3;
      context.strokeRect(this.position[1] * size / w, this.position[0] * size / h, size / w, size / h);
    }
    const share = active / (h * w);
    this.slider.value = this.unit;
    document.getElementById("unit-text").replaceChildren(
      element("span", { textContent: `Unit ${this.unit} of ${this.gallery.units}` }),
      element("span", { id: "active", textContent: `${(100 * share).toFixed(0)} % of positions active` }));
    this.slider.setAttribute("aria-valuetext", `unit ${this.unit}, ${(100 * share).toFixed(0)} percent active`);
    [...document.getElementById("blocks").children].forEach((b, k) => b.setAttribute("aria-pressed", k === this.block));
    const { label, predicted, mflops } = this.image;
    document.getElementById("caption").textContent =
      `${label}${label === predicted ? "" : `, taken for ${predicted}`} · ${mflops.toFixed(1)} MFLOPs · ${this.gallery.mode === "act" ? "ACT" : this.gallery.mode} mode`;
    this.probe();
  }

  probe() {
    const host = document.getElementById("probe"), [h, w] = this.gallery.sizes[this.block], L = this.gallery.units;
    if (!this.position) {
      host.replaceChildren(element("p", { className: "note", textContent: "Point at the picture or touch it, or go to it with Tab and move with the arrow keys, to see when and why a position halts." }));
      return;
    }
    const at = this.position[0] * w + this.position[1], steps = this.steps[this.block][at];
    const asked = Math.min(steps, L - 1);
    const probs = Array.from({ length: asked }, (_, l) => this.probs[this.block][l * h * w + at] / 255);
    const width = 420, height = 120, gap = width / L;
    const svg = node("svg", { viewBox: `0 0 ${width} ${height + 22}`, role: "img", "aria-label": "halting probabilities" });
    if (this.gallery.mode === "thresholded") svg.append(node("line", { class: "grid", x1: 0, x2: width, y1: height / 2 + 8, y2: height / 2 + 8, "stroke-dasharray": "3 4" }));
    for (let l = 0; l < L; l++) {
      const x = l * gap + gap * .15, bar = gap * .7;
      if (l < probs.length) {
        const tall = Math.max(1.5, probs[l] * (height - 16));
        svg.append(node("rect", { class: `bar${l + 1 === steps ? " on" : ""}`, x, y: height - tall, width: bar, height: tall, rx: Math.min(2, bar / 4) }));
        if (L <= 8) svg.append(node("text", { x: x + bar / 2, y: height - tall - 4, "text-anchor": "middle" }, probs[l].toFixed(2)));
      }
      if (L <= 8 || l % 3 === 0) svg.append(node("text", { x: x + bar / 2, y: height + 16, "text-anchor": "middle" }, `h${l + 1}`));
    }
    svg.append(node("line", { class: "grid", x1: 0, x2: width, y1: height, y2: height }));
    const said = steps < L ? `halts after unit ${steps}` : `runs all ${L} units`;
    host.replaceChildren(element("p", { textContent: `Row ${this.position[0] + 1}, column ${this.position[1] + 1}: ${said}` }), svg);
  }
}
