"use strict";
// Charts are drawn already. This adds: legend entries that show and hide, values at the pointer or by arrow keys, light and
// dark, what measures are drawn against, and copying.
(() => {
  const root = document.documentElement;
  const tip = document.getElementById("tip");
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];

  const formats = {
    number: (v) => (v === 0 || (Math.abs(v) >= 1e-3 && Math.abs(v) < 1e5) ? String(+v.toPrecision(4)) : v.toExponential(1)),
    percent: (v) => `${+(100 * v).toPrecision(4)} %`,
    bytes: (v) => {
      const units = ["B", "kB", "MB", "GB"];
      let i = 0;
      while (Math.abs(v) >= 1000 && i < 3) { v /= 1000; i += 1; }
      return `${+v.toPrecision(3)} ${units[i]}`;
    },
  };

  const heads = {
    bytes: formats.bytes,
    seconds: (v) => `${formats.number(v)} s`,
    exchanges: (v) => `${formats.number(v)} rounds of communication`,
  };

  // ---- light and dark
  const themes = ["system", "light", "dark"];
  const themeButton = document.getElementById("theme");
  const setTheme = (name) => {
    if (name === "system") root.removeAttribute("data-theme");
    else root.setAttribute("data-theme", name);
    themeButton.textContent = `theme: ${name}`;
    try { localStorage.setItem("coterie-theme", name); } catch (error) { /* a page from a file may have no storage */ }
  };
  themeButton.addEventListener("click", () => {
    const now = root.getAttribute("data-theme") || "system";
    setTheme(themes[(themes.indexOf(now) + 1) % 3]);
  });
  try { setTheme(themes.includes(localStorage.getItem("coterie-theme")) ? localStorage.getItem("coterie-theme") : "system"); }
  catch (error) { setTheme("system"); }

  // ---- the box with values
  const hideTip = () => { tip.hidden = true; all(".cursor").forEach((one) => one.remove()); };
  const showTip = (text, x, y) => {
    tip.textContent = text;
    tip.hidden = false;
    const wide = document.documentElement.clientWidth;
    tip.style.left = `${Math.max(4, Math.min(x + 14, wide - tip.offsetWidth - 6)) + window.scrollX}px`;
    tip.style.top = `${y + 14 + window.scrollY}px`;
  };
  const place = (svg, px, py) => {  // from the drawing's coordinates to the window's
    const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
    return [box.left + (px * box.width) / view.width, box.top + (py * box.height) / view.height];
  };
  const within = (svg, event) => {
    const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
    return [((event.clientX - box.left) * view.width) / box.width, ((event.clientY - box.top) * view.height) / box.height];
  };
  const cursor = (svg, x1, y1, x2, y2) => {
    all(".cursor").forEach((one) => one.remove());
    const line = document.createElementNS(svg.namespaceURI, "line");
    for (const [name, value] of Object.entries({ x1, y1, x2, y2, class: "cursor" })) line.setAttribute(name, value);
    svg.append(line);
  };

  const nearest = (list, value) => {
    let low = 0, high = list.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (list[middle] < value) low = middle; else high = middle;
    }
    return high < 0 ? -1 : Math.abs(list[high] - value) < Math.abs(list[low] - value) ? high : low;
  };

  const lineValues = (data, hidden, value, level) => {
    const [, , low, high, log] = data.ends;
    const up = (v) => (log ? Math.log10(Math.max(v, low)) / Math.log10(high / low) : (v - low) / (high - low));
    const rows = [];
    let at = value;
    for (const one of data.series) {
      if (hidden.has(one.key)) continue;
      const xs = one.x || data.at, i = nearest(xs, value);
      if (i < 0 || one.v[i] === null) continue;
      if (xs.length > 2) at = xs[i];
      rows.push({ name: one.name, v: one.v[i], far: level === null ? -one.v[i] : Math.abs(up(one.v[i]) - level) });
    }
    rows.sort((a, b) => a.far - b.far);
    const shown = rows.slice(0, 6).map((row) => `${row.name}: ${formats[data.y](row.v)}`);
    const more = rows.length > 6 ? [`and ${rows.length - 6} more`] : [];
    const head = data.x in heads ? heads[data.x](at) : `${data.x} ${formats.number(at)}`;
    return { text: [head, ...shown, ...more].join("\n"), at };
  };

  const valuesOf = (figure) => {
    const source = figure && figure.querySelector('script[type="application/json"]');
    return source ? JSON.parse(source.textContent) : {};
  };
  const mapText = (data, row, column) =>
    `${data.down} ${data.rows[row]}`.trim() + `, ${data.across} ${data.columns[column]}\nweight ${formats.number(data.v[row][column])}`;

  // ---- a figure comes alive
  const enliven = (figure) => {
    const svg = figure.querySelector("svg"), pad = svg && svg.querySelector(".pad");
    const data = valuesOf(figure);
    if (data.from) data.v = valuesOf(document.getElementById(data.from)).series.map((one) => one.v);
    const hidden = new Set();

    const toggle = (key) => {
      const name = key.dataset.toggle, off = !hidden.has(name);
      if (off) hidden.add(name); else hidden.delete(name);
      key.setAttribute("aria-pressed", String(!off));
      all("[data-key]", svg).forEach((one) => { if (one.dataset.key === name) one.classList.toggle("off", off); });
    };
    for (const key of svg ? all(".key", svg) : []) {
      key.setAttribute("role", "button");
      key.setAttribute("tabindex", "0");
      key.setAttribute("aria-pressed", "true");
      key.addEventListener("click", () => toggle(key));
      key.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") { event.preventDefault(); toggle(key); }
      });
    }

    if (data.kind === "graph") {
      for (const spot of all(".spot", svg)) {
        const light = (on) => all(".edge", svg).forEach((edge) => {
          const own = edge.dataset.a === spot.dataset.node;
          edge.classList.toggle("lit", on && own);
          edge.classList.toggle("dim", on && !own);
        });
        for (const [name, on] of [["mouseenter", true], ["mouseleave", false], ["focus", true], ["blur", false]])
          spot.addEventListener(name, () => light(on));
      }
      return;
    }
    if (!pad || !data.kind) return;

    const [left, top, width, height] = data.box;
    let spot = [0, 0];
    const show = (px, py, level) => {
      if (data.kind === "lines") {
        const [low, high] = data.ends;
        const found = lineValues(data, hidden, low + ((px - left) / width) * (high - low), level);
        const x = left + (width * (found.at - low)) / (high - low);
        cursor(svg, x, top, x, top + height);
        showTip(found.text, ...place(svg, px, py));
        return found.text;
      }
      const row = Math.min(data.rows.length - 1, Math.max(0, Math.floor(((py - top) / height) * data.rows.length)));
      const column = Math.min(data.columns.length - 1, Math.max(0, Math.floor(((px - left) / width) * data.columns.length)));
      spot = [row, column];
      const text = mapText(data, row, column);
      showTip(text, ...place(svg, px, py));
      return text;
    };
    pad.addEventListener("pointermove", (event) => {
      const [px, py] = within(svg, event);
      show(px, py, data.kind === "lines" ? 1 - (py - top) / height : null);
    });
    pad.addEventListener("pointerleave", hideTip);
    pad.setAttribute("tabindex", "0");
    pad.setAttribute("role", "slider");
    pad.setAttribute("aria-label", `${svg.getAttribute("aria-label")}; arrow keys read values`);
    pad.setAttribute("aria-valuemin", "0");
    pad.setAttribute("aria-valuemax", "100");
    pad.setAttribute("aria-valuenow", "0");
    let share = [0, 0];
    pad.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], Home: [-1e9, 0], End: [1e9, 0] }[event.key];
      if (event.key === "Escape") hideTip();
      if (!step) return;
      event.preventDefault();
      if (data.kind === "lines") {
        share = [Math.min(1, Math.max(0, share[0] + step[0] / 50)), 0.3];
      } else {
        const [row, column] = [spot[0] + step[1], spot[1] + step[0] * Math.ceil(data.columns.length / 50)];
        share = [(Math.min(data.columns.length - 1, Math.max(0, column)) + 0.5) / data.columns.length,
          (Math.min(data.rows.length - 1, Math.max(0, row)) + 0.5) / data.rows.length];
      }
      const text = show(left + share[0] * width, top + share[1] * height, null);
      pad.setAttribute("aria-valuenow", String(Math.round(100 * share[0])));
      pad.setAttribute("aria-valuetext", text);
    });
    pad.addEventListener("blur", hideTip);
  };

  // ---- what is not in one figure
  const showAxis = (name) => {
    all("[data-show]").forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.show === name)));
    all("figure[data-axis]").forEach((figure) => { figure.hidden = figure.dataset.axis !== name; });
  };
  all("figure").forEach(enliven);
  all("[data-show]").forEach((button) => button.addEventListener("click", () => showAxis(button.dataset.show)));
  for (const block of all("pre.copy")) {
    if (!navigator.clipboard) continue;
    const text = block.textContent, button = document.createElement("button");
    button.type = "button";
    button.textContent = "copy";
    button.addEventListener("click", () => navigator.clipboard.writeText(text).then(() => { button.textContent = "copied"; }));
    block.append(" ", button);
  }
  window.addEventListener("beforeprint", () => all("details").forEach((one) => { one.open = true; }));
})();
