// Draws results over the picture, and takes places that are marked in it. Places run from 0 to 1.

const SVG = "http://www.w3.org/2000/svg";
const DOT_PX = 7;
const DRAG_PX = 8;

export class Overlay {
  #marks = [];
  #lit = null;

  /** `onMark` gets what is marked in the picture: `[x, y]`, or `[x_min, y_min, x_max, y_max]`. */
  constructor(svg, frame, onMark) {
    this.svg = svg;
    this.frame = frame;
    /** What a click marks: "", "point" or "place" (a point, or a box by dragging). */
    this.marking = "";
    new ResizeObserver(() => this.#draw()).observe(frame);
    let start = null;
    frame.addEventListener("pointerdown", (event) => {
      if (!this.marking) return;
      event.preventDefault();
      frame.setPointerCapture(event.pointerId);
      start = event;
    });
    frame.addEventListener("pointerup", (event) => {
      if (start === null) return;
      const [from, to] = [this.#place(start), this.#place(event)];
      const moved = Math.hypot(event.clientX - start.clientX, event.clientY - start.clientY);
      start = null;
      if (this.marking === "point" || moved < DRAG_PX) onMark(to);
      else
        onMark([
          ...from.map((side, axis) => Math.min(side, to[axis])),
          ...from.map((side, axis) => Math.max(side, to[axis])),
        ]);
    });
  }

  /**
   * Show marks, each `{kind, …, label, isGiven, colour}`: a `point` has `at`, a `box` has `box`, an `outline` has `path`
   * and `box`, a `look` has `from` and `at`. `colour` is the number of a colour of the style; absent is the usual one.
   */
  show(marks) {
    this.#marks = marks;
    this.#lit = null;
    this.#draw();
  }

  get isEmpty() {
    return this.#marks.length === 0;
  }

  get hasOutline() {
    return this.#marks.some((mark) => mark.path && mark.box);
  }

  /** Emphasise the mark with this label; null emphasises none. */
  light(label) {
    this.#lit = label;
    this.#draw();
  }

  /** The picture with its marks, as large as the picture is. */
  drawnOver(image) {
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
    const context = canvas.getContext("2d");
    context.drawImage(image, 0, 0, canvas.width, canvas.height);
    context.scale(canvas.width / this.frame.clientWidth, canvas.height / this.frame.clientHeight);
    for (const shape of this.svg.querySelectorAll("rect, line, circle, path, text")) paint(context, shape);
    return canvas;
  }

  /** The insides of outlines in white on black, as large as the picture is. */
  maskOf(image) {
    const canvas = document.createElement("canvas");
    const [width, height] = ([canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight]);
    const context = canvas.getContext("2d");
    context.fillRect(0, 0, width, height);
    context.fillStyle = "white";
    for (const { path, box } of this.#marks.filter((mark) => mark.path && mark.box)) {
      const [left, top, right, bottom] = box.map((side, index) => side * (index % 2 ? height : width));
      const outline = new Path2D();
      outline.addPath(new Path2D(path), new DOMMatrix([right - left, 0, 0, bottom - top, left, top]));
      context.fill(outline);
    }
    return canvas;
  }

  #place(event) {
    const area = this.frame.getBoundingClientRect();
    const within = (value) => Math.round(Math.min(Math.max(value, 0), 1) * 1000) / 1000;
    return [within((event.clientX - area.left) / area.width), within((event.clientY - area.top) / area.height)];
  }

  #draw() {
    const { clientWidth: width, clientHeight: height } = this.frame;
    if (!width || !height) return;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren(...this.#marks.map((mark) => this.#group(mark, width, height)));
  }

  #group(mark, width, height) {
    const kinds = [mark.colour === undefined ? "" : `colour-${mark.colour}`];
    if (mark.label !== undefined && mark.label === this.#lit) kinds.push("lit");
    const group = element("g", { class: kinds.join(" ") });
    const given = mark.isGiven ? " given" : "";
    const stroke = (name, attributes) =>
      group.append(...["halo", `line${given}`].map((kind) => element(name, { class: kind, ...attributes })));
    const dot = ([x, y]) =>
      group.append(element("circle", { class: `dot${given}`, cx: x * width, cy: y * height, r: DOT_PX }));
    let corner = null;
    if (mark.kind === "point") {
      dot(mark.at);
      corner = [mark.at[0] * width + DOT_PX + 3, mark.at[1] * height - DOT_PX];
    } else if (mark.kind === "look") {
      const [from, to] = [mark.from, mark.at].map(([x, y]) => [x * width, y * height]);
      stroke("line", { x1: from[0], y1: from[1], x2: to[0], y2: to[1] });
      dot(mark.at);
    } else if (mark.box) {
      const [left, top, right, bottom] = mark.box.map((side, index) => side * (index % 2 ? height : width));
      stroke("rect", { x: left, y: top, width: right - left, height: bottom - top });
      corner = [left + 4, top < 20 ? top + 16 : top - 6];
      if (mark.path) {
        const shape = {
          d: mark.path,
          transform: `translate(${left} ${top}) scale(${right - left} ${bottom - top})`,
          "vector-effect": "non-scaling-stroke",
        };
        stroke("path", shape);
        group.append(element("path", { ...shape, class: "area" }));
      }
    }
    if (corner !== null && mark.label) {
      const text = element("text", { x: corner[0], y: corner[1] });
      text.textContent = mark.label;
      group.append(text);
    }
    return group;
  }
}

/** The whole commands of a path that is still being generated. */
export function wholeCommands(path) {
  const last = path.search(/[A-DF-Za-df-z][^A-DF-Za-df-z]*$/);
  return last > 0 ? path.slice(0, last) : "";
}

/** Draw a shape of the overlay as its style says. */
function paint(context, shape) {
  const style = getComputedStyle(shape);
  const size = (name) => shape[name].baseVal.value;
  context.fillStyle = style.fill;
  context.strokeStyle = style.stroke;
  context.lineWidth = parseFloat(style.strokeWidth);
  context.lineJoin = "round";
  if (shape.tagName === "text") {
    context.font = style.font;
    const place = [shape.textContent, Number(shape.getAttribute("x")), Number(shape.getAttribute("y"))];
    context.strokeText(...place);
    context.fillText(...place);
    return;
  }
  const outline = new Path2D();
  if (shape.tagName === "rect") outline.rect(size("x"), size("y"), size("width"), size("height"));
  else if (shape.tagName === "circle") outline.arc(size("cx"), size("cy"), size("r"), 0, 2 * Math.PI);
  else if (shape.tagName === "line") {
    outline.moveTo(size("x1"), size("y1"));
    outline.lineTo(size("x2"), size("y2"));
  } else outline.addPath(new Path2D(shape.getAttribute("d")), shape.transform.baseVal.consolidate().matrix);
  context.globalAlpha = parseFloat(style.fillOpacity);
  if (style.fill !== "none") context.fill(outline);
  context.globalAlpha = 1;
  if (style.stroke !== "none") context.stroke(outline);
}

function element(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}
