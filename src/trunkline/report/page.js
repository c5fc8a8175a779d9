"use strict";
// What moves on the page: the theme, the value under the pointer, and the zoom of the lanes.
(() => {
  const tip = document.getElementById("tip");

  const figures = (x) => Math.abs(x) >= 100 ? Math.round(x).toLocaleString("en") : x.toPrecision(3);
  const seconds = (s) => s >= 1 ? `${s >= 1000 ? s.toFixed(1) : s.toPrecision(4)} s`
    : s >= 1e-3 ? `${(s * 1e3).toPrecision(4)} ms` : `${(s * 1e6).toPrecision(4)} µs`;
  const bytes = (n) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let unit = 0;
    while (n >= 1024 && unit < units.length - 1) { n /= 1024; unit += 1; }
    return `${unit ? n.toFixed(1) : n} ${units[unit]}`;
  };

  const tell = (text, event) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = event.clientX + 14 + box.width > innerWidth ? event.clientX - 14 - box.width : event.clientX + 14;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, event.clientY - box.height - 12)}px`;
  };
  const hush = () => { tip.hidden = true; };

  const theme = document.getElementById("theme");
  theme.hidden = false;
  theme.addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.style.colorScheme ? root.style.colorScheme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    root.style.colorScheme = dark ? "light" : "dark";
  });

  for (const chart of document.querySelectorAll("svg[data-hover]")) {
    const data = JSON.parse(chart.dataset.hover);
    const cross = chart.querySelector(".cross");
    chart.addEventListener("pointermove", (event) => {
      const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(chart.getScreenCTM().inverse());
      let at, text;
      if (data.kind === "bytes") {
        const share = (point.x - data.left) / (data.end - data.left);
        if (share < 0 || share >= 1) { hush(); cross.style.visibility = "hidden"; return; }
        const second = share * data.seconds;
        const phase = data.phases.find(([, begin, end]) => begin <= second && second < end);
        const value = data.values[Math.floor(share * data.values.length)];
        at = point.x;
        text = `${bytes(value)}\nat ${seconds(second)}${phase ? `, ${phase[0]}` : ""}`;
      } else {
        let best = 0;
        data.at.forEach((x, index) => {
          if (Math.abs(x - point.x) < Math.abs(data.at[best] - point.x)) best = index;
        });
        at = data.at[best];
        text = `${data.heads[best]}\n${figures(data.values[best])}`;
      }
      cross.setAttribute("x1", at);
      cross.setAttribute("x2", at);
      cross.style.visibility = "visible";
      tell(text, event);
    });
    chart.addEventListener("pointerleave", () => { hush(); cross.style.visibility = "hidden"; });
  }

  for (const box of document.querySelectorAll(".lanes")) zoomable(box, box.parentElement.querySelector(".controls"));

  function zoomable(box, controls) {
    const data = JSON.parse(box.querySelector("script").textContent);
    const whole = data.seconds / data.unit;
    const lanes = data.lanes.map(({ name, segments }) => {
      const begins = [], ends = [], labels = [];
      let reached = 0;
      for (let i = 0; i < segments.length; i += 3) {
        begins.push(reached + segments[i]);
        reached += segments[i] + segments[i + 1];
        ends.push(reached);
        labels.push(segments[i + 2]);
      }
      return { name, begins, ends, labels };
    });
    const row = 34, gap = 8, top = 26, left = 76, right = 14;
    const height = top + lanes.length * (row + gap) + 42;
    const space = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(space, "svg");
    svg.setAttribute("class", "chart zoomable");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", "Lanes over one step; arrow keys move, plus and minus zoom");
    svg.setAttribute("tabindex", "0");
    let from = 0, to = whole, width = 0, hits = [];

    const add = (name, attributes, text) => {
      const made = document.createElementNS(space, name);
      for (const key in attributes) made.setAttribute(key, attributes[key]);
      if (text !== undefined) made.textContent = text;
      svg.append(made);
    };

    const draw = () => {
      width = box.clientWidth;
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      svg.replaceChildren();
      hits = [];
      const scale = (width - left - right) / (to - from);
      const x = (tick) => left + (Math.min(to, Math.max(from, tick)) - from) * scale;
      const bottom = height - 42;
      for (const [name, begin, end] of data.phases) {
        if (end <= from || begin >= to) continue;
        const a = x(begin), b = x(end);
        add("rect", { x: a, y: top, width: b - a, height: bottom - top, class: `band ${name}` });
        add("rect", { x: a, y: top - 20, width: b - a, height: 20, class: `strip ${name}` });
        if (b - a > 8.2 * name.length) {
          add("text", { x: (a + b) / 2, y: top - 6, "text-anchor": "middle", class: "phase" }, name);
        }
      }
      ticks(scale, x, bottom);
      lanes.forEach((lane, index) => {
        const y = top + gap + index * (row + gap);
        add("text", { x: left - 8, y: y + row / 2 + 4, "text-anchor": "end", class: "lane" }, lane.name);
        pieces(lane, y, scale, x);
      });
      add("line", { x1: left, x2: width - right, y1: bottom, y2: bottom, class: "axis" });
      svg.dataset.from = (from * data.unit).toPrecision(6);
      svg.dataset.to = (to * data.unit).toPrecision(6);
    };

    const ticks = (scale, x, bottom) => {
      const rough = (to - from) * data.unit / Math.max(2, width / 85);
      const power = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= rough * 0.999);
      const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
      for (let i = Math.ceil(from * data.unit / step); i * step <= to * data.unit * (1 + 1e-9); i += 1) {
        const at = x(i * step / data.unit);
        add("line", { x1: at, x2: at, y1: bottom, y2: bottom + 4, class: "rule" });
        const text = (i * step).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
        const anchor = at + 4 * text.length > width ? "end" : "middle";
        add("text", { x: Math.min(at, width - 1), y: bottom + 18, "text-anchor": anchor, class: "tick" }, text);
      }
      const middle = (left + width - right) / 2;
      add("text", { x: middle, y: height - 6, "text-anchor": "middle", class: "tick" }, "seconds");
    };

    // Pieces narrower than a pixel and a half are gathered by pixel, as high as the lane is busy in it.
    const pieces = (lane, y, scale, x) => {
      const busy = new Float64Array(Math.ceil(width) + 2);
      for (let i = 0; i < lane.begins.length; i += 1) {
        if (lane.ends[i] <= from || lane.begins[i] >= to) continue;
        const a = x(lane.begins[i]), b = x(lane.ends[i]);
        const text = data.labels[lane.labels[i]];
        hits.push({ a, b, y, text, lane: lane.name, ticks: lane.ends[i] - lane.begins[i] });
        if (b - a < 1.5) {
          const first = Math.floor(a), last = Math.floor(b);
          if (first === last) busy[first] += b - a;
          else { busy[first] += last - a; busy[last] += b - last; }
          continue;
        }
        const edge = b - a > 4 ? 0.6 : 0;
        add("rect", { x: a + edge / 2, y, width: b - a - edge, height: row, class: `segment ${lane.name}` });
        if (b - a > 7 * text.length + 8) {
          add("text", { x: (a + b) / 2, y: y + row / 2 + 4, "text-anchor": "middle", class: "piece" }, text);
        }
      }
      let path = "", before = 0;
      busy.forEach((share, column) => {
        const tall = share > 0 ? Math.max(1, Math.min(1, share) * row) : 0;
        if (tall !== before) path += `H${column}V${(y + row - tall).toFixed(1)}`;
        before = tall;
      });
      if (path) add("path", { d: `M0 ${y + row}${path}H${busy.length}V${y + row}Z`, class: `segment ${lane.name}` });
    };

    const show = (begin, length) => {
      length = Math.min(whole, Math.max(whole / 5000, length));
      from = Math.min(whole - length, Math.max(0, begin));
      to = from + length;
      draw();
    };
    const zoom = (factor, share) => show(from + (to - from) * share * (1 - factor), (to - from) * factor);
    const shareOf = (event) => {
      const area = svg.getBoundingClientRect();
      return Math.min(1, Math.max(0, (event.clientX - area.left - left) / (area.width - left - right)));
    };

    svg.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && document.activeElement !== svg) return;
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, shareOf(event));
    }, { passive: false });
    let grabbed = null;
    svg.addEventListener("pointerdown", (event) => {
      grabbed = { x: event.clientX, from };
      svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointerup", () => { grabbed = null; });
    svg.addEventListener("pointercancel", () => { grabbed = null; });
    svg.addEventListener("pointermove", (event) => {
      if (grabbed) {
        hush();
        show(grabbed.from - (event.clientX - grabbed.x) * (to - from) / (width - left - right), to - from);
        return;
      }
      const area = svg.getBoundingClientRect();
      const px = event.clientX - area.left, py = event.clientY - area.top;
      let near = null;
      for (const hit of hits) {
        if (py < hit.y || py > hit.y + row || px < hit.a - 1 || px > hit.b + 1) continue;
        if (!near || hit.ticks > near.ticks) near = hit;
      }
      if (!near) { hush(); return; }
      tell(`${near.lane}: ${near.text}\n${seconds(near.ticks * data.unit)}`, event);
    });
    svg.addEventListener("pointerleave", hush);
    svg.addEventListener("dblclick", () => show(0, whole));
    svg.addEventListener("keydown", (event) => {
      const moves = {
        ArrowLeft: () => show(from - (to - from) / 8, to - from),
        ArrowRight: () => show(from + (to - from) / 8, to - from),
        "+": () => zoom(0.5, 0.5),
        "-": () => zoom(2, 0.5),
        Home: () => show(0, whole),
      };
      if (!moves[event.key]) return;
      event.preventDefault();
      moves[event.key]();
    });
    controls.hidden = false;
    controls.addEventListener("click", (event) => {
      const asked = event.target.dataset.zoom;
      if (asked === "all") show(0, whole);
      else if (asked) zoom(Number(asked), 0.5);
    });
    box.replaceChildren(svg);
    draw();
    new ResizeObserver(() => { if (box.clientWidth !== width) draw(); }).observe(box);
  }
})();
