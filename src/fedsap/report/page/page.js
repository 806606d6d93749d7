"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const make = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (key === "class") node.className = value;
      else if (key === "tint") node.style.setProperty("--tint", value);
      else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (value !== false && value != null) node.setAttribute(key, value === true ? "" : value);
    }
    node.append(...children);
    return node;
  };
  let data = JSON.parse($("data").textContent);
  const hidden = new Set();
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  const DASHES = ["solid", "dash", "dashdot", "dot"];
  const LOGARITHMIC = ["partition.shots", "method.proxy_scale"];
  const BORDERS = ["solid", "dashed", "dashed", "dotted"];
  const MARKERS = ["circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x", "hexagon"];
  const SIGNS = ["●", "■", "▲", "◆", "▼", "✚", "✖", "⬢"];
  const dashOf = (i) => (i + Math.floor(i / data.palette.length)) % DASHES.length;
  const markOf = (i) => (i + Math.floor(i / data.palette.length)) % MARKERS.length;
  const lower = (text) => text.charAt(0).toLowerCase() + text.slice(1);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const LIGHTER = { "#000000": "#e6e6e6", "#0072B2": "#1f7fd0", "#882255": "#8b6cf0" };  // on dark paper
  const shown = (colour) => (css("--dark") === "1" ? LIGHTER[colour] ?? colour : colour);
  const tint = (i) => shown(data.palette[i % data.palette.length]);
  const classTint = (c) => shown(data.classes[c % data.classes.length]);
  const classMark = (c) => markOf(Math.floor(c / data.palette.length));
  const number = (label) => data.methods.findIndex((m) => m.label === label);
  const said = (pair, digits = 2) => pair[0] == null ? "–" : pair[0].toFixed(digits) + (pair[1] == null ? "" : ` ± ${pair[1].toFixed(digits)}`);
  const count = (n) => n >= 1e9 ? `${(n / 1e9).toFixed(1)} G` : n >= 1e6 ? `${(n / 1e6).toFixed(1)} M` : n >= 1e3 ? `${(n / 1e3).toFixed(1)} k` : `${Math.round(n)}`;
  const setting = () => $("setting").value;
  const here = () => data.variants.filter((v) => v.setting === setting());

  function options(select, values, chosen) {
    const before = chosen ?? select.value, same = [...select.options].map((o) => [o.value, o.text]);
    if (JSON.stringify(same) !== JSON.stringify(values.map((pair) => pair.map(String)))) select.replaceChildren(...values.map(([value, text]) => make("option", { value }, text)));
    if (values.some(([value]) => String(value) === String(before))) select.value = before;
  }

  // --- plots

  function layout(extra) {
    const axis = { gridcolor: css("--grid"), linecolor: css("--line"), zeroline: false, ticks: "outside", tickcolor: css("--line"), automargin: true };
    const { xaxis = {}, yaxis = {}, ...rest } = extra;
    return {
      font: { family: "system-ui, sans-serif", size: 13, color: css("--ink") }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 58, r: 14, t: 12, b: 48 }, showlegend: false, dragmode: false,
      hoverlabel: { bgcolor: css("--paper"), bordercolor: css("--line"), font: { color: css("--ink") } },
      xaxis: { ...axis, fixedrange: true, ...xaxis }, yaxis: { ...axis, fixedrange: true, ...yaxis }, ...rest,
    };
  }
  const settings = { displayModeBar: false, responsive: true };
  const faint = (colour) => colour + "2e";

  function drawCurves() {
    const measure = $("measure").value;
    const unit = measure === "silhouette" ? "silhouette (−1 to 1)" : measure.startsWith("loss:") ? "loss" : measure.startsWith("noted:") ? measure.slice(6) : ["unlabelled:margin", "unlabelled:distance"].includes(measure) ? "cosine distance" : `${data.measures[measure] ?? ""}, %`;
    const traces = [], words = [], lines = [];
    for (const v of here()) {
      const curve = v.curves[measure], i = number(v.label);
      if (!curve || hidden.has(v.label) || (measure === "proto" || measure === "proto_cos") && !data.methods[i].bank) continue;
      const colour = tint(i), many = v.seeds.length > 1;
      if (many && $("band").checked) {
        const up = curve.y.map((y, k) => (y == null ? null : y + curve.s[k])), down = curve.y.map((y, k) => (y == null ? null : y - curve.s[k]));
        const edge = { x: curve.x, mode: "lines", line: { width: 0 }, hoverinfo: "skip", meta: "band" };
        traces.push({ ...edge, y: down }, { ...edge, y: up, fill: "tonexty", fillcolor: faint(colour) });
      }
      traces.push({
        x: curve.x, y: curve.y, name: v.label, meta: "curve", mode: curve.x.length > 40 ? "lines" : "lines+markers", customdata: curve.s,
        line: { color: colour, width: 2.25, dash: DASHES[dashOf(i)] }, marker: { size: 7, symbol: MARKERS[markOf(i)] },
        hovertemplate: `<b>%{y:.2f}</b>${many ? " ± %{customdata:.2f}" : ""}  ${v.label.replace(/[<>&]/g, "")}<extra></extra>`,
      });
      lines.push([v.label, curve]);
      words.push(`${v.label} ${curve.y.at(-1)?.toFixed(2) ?? "–"} in round ${curve.x.at(-1)}`);
    }
    const marks = Object.entries(Object.fromEntries(here().flatMap((v) => v.marks).map(([name, t]) => [t, name])));
    const shapes = marks.map(([t]) => ({ type: "line", x0: t, x1: t, yref: "paper", y0: 0, y1: 1, line: { color: css("--soft"), width: 1.5, dash: "dot" } }));
    const annotations = marks.map(([t, name]) => ({ x: t, yref: "paper", y: 1, text: name, showarrow: false, xanchor: "left", yanchor: "top", font: { size: 11 } }));
    $("band").closest("label").hidden = !here().some((v) => v.seeds.length > 1);
    const turned = traces.some((trace) => trace.fill);  // then plotly turns the list round
    const hover = { hovermode: "x unified", hoverdistance: -1, hoversort: `value ${turned ? "ascending" : "descending"}` };
    Plotly.react($("curve-plot"), traces, layout({ xaxis: { title: { text: "round" }, rangemode: "tozero", unifiedhovertitle: { text: "round %{x}" } }, yaxis: { title: { text: unit } }, ...hover, shapes, annotations }), settings);
    const caption = `${data.measures[measure]} over rounds, ${setting()}: mean over clients and seeds.`;
    $("curve-caption").textContent = caption;
    $("curve-plot").setAttribute("aria-label", words.length ? `${caption} ${words.join("; ")}.` : "No curve to show.");
    const rounds = [...new Set(lines.flatMap(([, c]) => c.x))].sort((a, b) => a - b);
    const rows = rounds.map((t) => [t, ...lines.map(([, c]) => { const k = c.x.indexOf(t); return k < 0 || c.y[k] == null ? "–" : c.y[k].toFixed(2); })]);
    $("curve-data").lastElementChild.replaceChildren(table(["round", ...lines.map(([label]) => label)], rows, 0));
  }

  function toggles() {
    const field = $("toggles"), legend = field.firstElementChild;
    const chips = here().map((v) => {
      const i = number(v.label);
      const box = make("input", { type: "checkbox", "data-method": v.label, checked: !hidden.has(v.label), onchange: (event) => {
        if (event.target.checked) hidden.delete(v.label); else hidden.add(v.label);
        drawCurves();
      } });
      const swatch = make("span", { class: "swatch", tint: tint(i), "aria-hidden": "true" });
      swatch.style.borderTopStyle = BORDERS[dashOf(i)];
      return make("label", { class: "chip" }, box, swatch, make("span", { class: "sign", tint: tint(i), "aria-hidden": "true" }, SIGNS[markOf(i)]), v.label);
    });
    const every = (on) => () => {
      for (const box of field.querySelectorAll("input")) {
        box.checked = on;
        if (on) hidden.delete(box.dataset.method); else hidden.add(box.dataset.method);
      }
      drawCurves();
    };
    const both = [["All", true], ["None", false]].map(([say, on]) => make("button", { type: "button", class: "chip", onclick: every(on) }, say));
    field.replaceChildren(legend, ...chips, ...(chips.length > 2 ? both : []));
  }

  // --- tables

  function table(heads, rows, labels = 1) {
    const head = make("tr", {}, ...heads.map((h, i) => make("th", { scope: "col", "aria-sort": "none", class: i < labels ? "" : "number" }, make("button", { type: "button" }, h))));
    const body = rows.map((row) => make("tr", {}, ...row.map((cell, i) => {
      const numeric = i >= labels && cell !== "–" && !Number.isNaN(Number(cell));
      return make("td", { class: i < labels ? "wrap" : "number", "data-value": numeric ? cell : false }, String(cell));
    })));
    const node = make("table", { class: "sortable" }, make("thead", {}, head), make("tbody", {}, ...body));
    sortable(node);
    return node;
  }

  function sortable(node, sorted) {
    const heads = [...node.tHead.rows[node.tHead.rows.length - 1].cells];
    const sort = (column, order) => {
      heads.forEach((h, i) => h.setAttribute("aria-sort", i === column ? order : "none"));
      const sign = order === "ascending" ? 1 : -1;
      for (const body of node.tBodies) {
        const rows = [...body.rows].filter((row) => !row.classList.contains("block"));
        const value = (row) => row.cells[column].dataset.value;
        rows.sort((a, b) => {
          const x = value(a), y = value(b);
          if (x != null && y != null) return sign * (Number(x) - Number(y));
          if (x != null || y != null) return x != null ? -1 : 1;
          return sign * a.cells[column].textContent.localeCompare(b.cells[column].textContent, undefined, { numeric: true });
        });
        body.append(...rows);
      }
    };
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const first = head.classList.contains("number") ? "descending" : "ascending";
      const other = first === "descending" ? "ascending" : "descending";
      sort(column, head.getAttribute("aria-sort") === first ? other : first);
    }));
    if (sorted) sort(...sorted);
  }

  const sortedBy = (node) => {
    const heads = node ? [...node.tHead.rows[node.tHead.rows.length - 1].cells] : [];
    const column = heads.findIndex((h) => h.getAttribute("aria-sort") !== "none");
    return column < 0 ? null : [column, heads[column].getAttribute("aria-sort")];
  };

  // --- overview

  function overview() {
    $("cards").replaceChildren(...here().map((v) => {
      const m = data.methods[number(v.label)];
      const rows = [["Head", make("b", {}, `${said(v.last.head, 1)} %`)]];
      if (m.bank) rows.push(["Prototype", make("b", {}, `${said(v.last.proto, 1)} %`)]);
      rows.push(["Silhouette", said(v.last.silhouette)], ["Up", count(v.up)], ["Down", count(v.down)], ["Seeds", v.seeds.join(", ")], ["Seconds", v.seconds]);
      return make("article", { class: "card", tint: tint(number(v.label)) },
        make("h3", {}, v.label), make("p", { class: "muted" }, [m.paper, m.sends && (m.sends.startsWith("up") ? `Sent ${m.sends}` : `Sends ${m.sends}`)].filter(Boolean).join(". ")),
        ...(v.over ? [] : [make("span", { class: "status" }, `round ${v.round} of ${v.planned}`)]),
        make("dl", {}, ...rows.flatMap(([k, x]) => [make("dt", {}, k), make("dd", {}, x)])));
    }));
    const running = data.running ? `, ${data.running} not over` : "";
    $("summary").textContent = `${data.runs} run${data.runs === 1 ? "" : "s"}${running}, ${data.settings.length} setting${data.settings.length === 1 ? "" : "s"}, ${data.methods.length} method${data.methods.length === 1 ? "" : "s"}. ${data.live ? "Live" : "Made"}: ${data.made}.`;
    $("notes").hidden = !data.notes.length;
    $("notes").replaceChildren(make("strong", {}, "Left out or shortened"), make("ul", {}, ...data.notes.map((n) => make("li", {}, n))));
  }

  // --- embeddings

  let timer = null;
  const panel = (side) => data.explorer.find((e) => e.setting === setting() && e.label === $(side).value);
  const rounds = () => [...new Set(["left", "right"].map(panel).filter(Boolean).flatMap((e) => e.rounds.map((r) => r.t)))].sort((a, b) => a - b);

  function explorer() {
    const mine = data.explorer.filter((e) => e.setting === setting());
    const kept = here().some((v) => v.kept);
    $("explorer").hidden = !mine.length;
    $("no-embeddings").hidden = mine.length > 0 || kept;
    $("no-layout").hidden = mine.length > 0 || !kept;
    $("no-layout").textContent = data.live ? "Embeddings are being laid out; they appear here by themselves." : "Embeddings of this setting were kept and are not laid out here; a report of fewer runs has room for them.";
    if (!mine.length) return;
    const values = mine.map((e) => [e.label, e.label]), first = !$("left").value;
    options($("left"), values);
    options($("right"), [["", "nothing"], ...values], first && mine.length > 1 ? mine[1].label : undefined);
    const all = rounds(), slider = $("round"), atEnd = first || slider.value === slider.max;
    slider.max = all.length - 1;
    if (atEnd) slider.value = all.length - 1;
    $("sample").max = panel("left").labels.length - 1;
    drawPanels(false);
    tellSample(Number($("sample").value), "left");
  }

  function drawPanels(moving) {
    const all = rounds(), t = all[Math.min(Number($("round").value), all.length - 1)];
    $("round-now").textContent = `round ${t}`;
    $("round").setAttribute("aria-valuetext", `round ${t}`);
    $("right-figure").hidden = !panel("right");  // first: what is beside it says how wide a plot is
    for (const side of ["left", "right"]) {
      const one = panel(side);
      if (one) drawPanel(side, one, t, moving);
    }
    legend(panel("left"));
  }

  function drawPanel(side, one, t, moving) {
    const at = one.rounds.filter((r) => r.t <= t).at(-1) ?? one.rounds[0];
    const byClient = document.querySelector("input[name=tint]:checked").value === "client";
    const groups = byClient ? one.clients : one.labels, plot = $(`${side}-plot`);
    const points = {
      x: at.x, y: at.y, mode: "markers", type: "scatter", hoverinfo: "none", meta: "points",
      marker: { size: 7, opacity: 0.85, line: { width: css("--dark") === "1" ? 0 : 0.6, color: css("--soft") }, color: groups.map(classTint), symbol: groups.map((g) => MARKERS[classMark(g)]) },
    };
    const stars = {
      x: at.stars.map((s) => s[0]), y: at.stars.map((s) => s[1]), mode: "markers", type: "scatter", hoverinfo: "text", meta: "stars",
      text: at.stars.map((s) => `prototype of ${one.names[s[2]]}`),
      marker: { size: 18, symbol: "star", color: at.stars.map((s) => (byClient ? css("--paper") : classTint(s[2]))), line: { width: 1.75, color: css("--star") } },
    };
    const pick = Number($("sample").value);
    const ring = { x: [at.x[pick]], y: [at.y[pick]], mode: "markers", type: "scatter", hoverinfo: "skip", meta: "ring", marker: { size: 17, symbol: "circle-open", color: css("--ink"), line: { width: 2.5 } } };
    const axis = { range: [-1.1, 1.1], showgrid: false, showticklabels: false, ticks: "", showline: false };
    const place = layout({ xaxis: axis, yaxis: axis, margin: { l: 4, r: 4, t: 4, b: 4 }, hovermode: "closest" });
    $(`${side}-title`).textContent = `${one.label}, round ${at.t}, seed ${one.seed}`;
    plot.setAttribute("aria-label", `t-SNE of ${at.x.length} embeddings of ${one.label} after round ${at.t}, ${at.stars.length ? `with ${at.stars.length} prototypes as stars` : "no prototypes"}.`);
    const same = plot.data && plot.data[0].x.length === at.x.length && plot.data[1].x.length === at.stars.length;
    if (moving && same && !calm.matches) {
      Plotly.animate(plot, { data: [points, stars, ring], traces: [0, 1, 2], layout: place }, { transition: { duration: 450, easing: "cubic-in-out" }, frame: { duration: 450, redraw: false }, mode: "immediate" }).catch(() => {});
    } else Plotly.react(plot, [points, stars, ring], place, settings);
    if (!plot.dataset.heard) {
      plot.dataset.heard = "yes";
      plot.on("plotly_hover", (event) => {
        const point = event.points.find((p) => p.data.meta === "points");
        if (!point) return;
        tip(side, point.pointNumber, event.event ?? { clientX: 0, clientY: 0 });
        tellSample(point.pointNumber, side);
      });
      plot.on("plotly_unhover", () => { $("tip").hidden = true; });
    }
  }

  function legend(one) {
    const byClient = document.querySelector("input[name=tint]:checked").value === "client";
    const groups = [...new Set(byClient ? one.clients : one.labels)].sort((a, b) => a - b);
    $("class-legend").setAttribute("aria-label", byClient ? "Clients" : "Classes");
    $("class-legend").replaceChildren(...groups.slice(0, 120).map((g) => make("li", { tint: classTint(g) }, make("span", { "aria-hidden": "true" }, SIGNS[classMark(g)]), byClient ? `client ${g}` : one.names[g])));
  }

  function thumbnail(node, one, i, side) {
    const sheet = data.sheets[one.sheet];
    node.style.backgroundImage = "none";
    if (!sheet) return;
    const scale = side / Math.max(sheet.width, sheet.height), column = i % sheet.columns, row = Math.floor(i / sheet.columns);
    node.style.width = `${sheet.width * scale}px`;
    node.style.height = `${sheet.height * scale}px`;
    node.style.backgroundImage = `url(${sheet.uri})`;
    node.style.backgroundSize = `${sheet.columns * sheet.width * scale}px ${sheet.rows * sheet.height * scale}px`;
    node.style.backgroundPosition = `${-column * sheet.width * scale}px ${-row * sheet.height * scale}px`;
  }

  const about = (one, i) => `class ${one.names[one.labels[i]]}, client ${one.clients[i]}`;

  function tip(side, i, event) {
    const one = panel(side), node = $("tip"), image = make("div", { class: "thumb" });
    thumbnail(image, one, i, 64);
    node.replaceChildren(image, make("div", {}, make("b", {}, `class ${one.names[one.labels[i]]}`), make("br"), `client ${one.clients[i]}`));
    node.hidden = false;
    node.style.left = `${Math.min(event.clientX + 16, innerWidth - node.offsetWidth - 8)}px`;
    node.style.top = `${Math.min(event.clientY + 16, innerHeight - node.offsetHeight - 8)}px`;
  }

  function tellSample(i, side) {
    const one = panel(side) ?? panel("left");
    if (i >= one.labels.length) i = 0;
    $("sample").value = i;
    $("sample").setAttribute("aria-valuetext", `sample ${i + 1}, ${about(one, i)}`);
    $("sample-text").textContent = `${i + 1} of ${one.labels.length}: ${about(one, i)}`;
    thumbnail($("thumb"), one, i, 72);
    $("thumb").setAttribute("aria-label", `Image of ${about(one, i)}`);
    for (const which of ["left", "right"]) {
      const plot = $(`${which}-plot`), other = panel(which);
      if (!other || !plot.data) continue;
      const now = plot.data[0];
      if (i < now.x.length) Plotly.restyle(plot, { x: [[now.x[i]]], y: [[now.y[i]]] }, [2]);
    }
  }

  function play() {
    const button = $("play"), slider = $("round");
    if (timer) { clearInterval(timer); timer = null; button.textContent = "Play"; return; }
    button.textContent = "Pause";
    slider.value = 0;
    drawPanels(true);
    timer = setInterval(() => {
      if (Number(slider.value) >= Number(slider.max)) { play(); return; }
      slider.value = Number(slider.value) + 1;
      drawPanels(true);
    }, 1100);
  }

  // --- clients

  function clients() {
    const mine = data.clients.filter((c) => c.setting === setting());
    options($("client-method"), [...new Set(mine.map((c) => c.label))].map((l) => [l, l]));
    const seeds = mine.filter((c) => c.label === $("client-method").value).map((c) => c.seed);
    options($("client-seed"), seeds.map((s) => [s, s]));
    const one = mine.find((c) => c.label === $("client-method").value && String(c.seed) === $("client-seed").value);
    const before = sortedBy($("client-table").querySelector("table"));
    if (one) {
      const keys = Object.keys(one.accuracy);
      const rows = one.owned.map((own, q) => [q, own, one.samples[q], ...keys.map((k) => (one.accuracy[k][q] == null ? "–" : one.accuracy[k][q].toFixed(2)))]);
      const node = table(["client", "classes", "samples", ...keys.map((k) => `${data.names[k]}, %`)], rows, 2);
      for (const row of node.tBodies[0].rows) row.cells[0].dataset.value = row.cells[0].textContent;
      $("client-caption").textContent = (`${one.label}, ${one.setting}, seed ${one.seed}: accuracy of every client on its own classes in the last evaluated round.`);
      if (before) sortable(node, before);
      $("client-table").replaceChildren(node);
    } else $("client-table").replaceChildren();
    const labels = [...new Set(mine.map((c) => c.label))], words = [];
    const traces = labels.map((label, place) => {
      const values = mine.filter((c) => c.label === label).flatMap((c) => c.accuracy.head.map((y, q) => [y, `client ${q}, seed ${c.seed}`])).filter(([y]) => y != null);
      const mean = values.reduce((sum, [y]) => sum + y, 0) / values.length;
      words.push(`${label}: mean ${mean.toFixed(1)} %, from ${Math.min(...values.map(([y]) => y)).toFixed(1)} to ${Math.max(...values.map(([y]) => y)).toFixed(1)} %`);
      const i = number(label);
      return [
        { x: values.map((_, k) => place + 0.5 * (((k * 0.618034) % 1) - 0.5)), y: values.map(([y]) => y), text: values.map(([, say]) => say), mode: "markers", type: "scatter", name: label, marker: { color: tint(i), size: 7, opacity: 0.6, symbol: MARKERS[markOf(i)] }, hovertemplate: "%{text}: %{y:.2f} %<extra></extra>" },
        { x: [place - 0.34, place + 0.34], y: [mean, mean], mode: "lines", type: "scatter", line: { color: tint(i), width: 3 }, hovertemplate: `mean ${mean.toFixed(2)} %<extra></extra>` },
      ];
    }).flat();
    Plotly.react($("client-plot"), traces, layout({ xaxis: { tickvals: labels.map((_, i) => i), ticktext: labels, range: [-0.6, labels.length - 0.4], showgrid: false }, yaxis: { title: { text: "head accuracy of a client, %" } }, hovermode: "closest" }), settings);
    $("client-plot").setAttribute("aria-label", `Head accuracy of every client. ${words.join("; ")}.`);
  }

  // --- studies, reproduction

  function studies() {
    $("no-studies").hidden = data.sweeps.length > 0;
    const groups = new Map();
    for (const one of data.sweeps) {
      const key = `${one.title} – ${one.setting}`;
      groups.set(key, [...(groups.get(key) ?? []), one]);
    }
    const figures = [...groups].slice(0, 40).map(([key, several]) => {
      const plot = make("div", { class: "plot", role: "img", "aria-label": `${key}: ${several.map((s) => s.label).join(", ")}` });
      return [make("figure", {}, make("figcaption", {}, key), plot), plot, several];
    });
    $("study-list").replaceChildren(...figures.map(([figure]) => figure));
    for (const [, plot, several] of figures) {
      let k = 0;
      const values = [...new Set(several.flatMap((one) => one.x))].sort((a, b) => a - b);
      const named = values.some((v) => typeof v === "string"), log = LOGARITHMIC.includes(several[0].key) && values[0] > 0;
      const axis = named ? { type: "category" } : { type: log ? "log" : "linear", tickvals: values, ticktext: values.map(String) };
      const traces = several.flatMap((one) => Object.entries(one.points).map(([measure, p]) => {
        const i = k++;
        return { x: one.x, y: p.y, name: `${one.label}, ${lower(data.measures[measure])}`, mode: named ? "markers" : "lines+markers", type: "scatter", error_y: { type: "data", array: p.s, thickness: 1.5, width: 5 }, line: { color: tint(i), dash: DASHES[dashOf(i)] }, marker: { size: 8, symbol: MARKERS[markOf(i)] }, hovertemplate: "%{x}: %{y:.2f} %<extra>%{fullData.name}</extra>" };
      }));
      Plotly.react(plot, traces, layout({ showlegend: true, legend: { orientation: "h", y: -0.25 }, xaxis: { ...axis, title: { text: several[0].axis } }, yaxis: { title: { text: "accuracy, %" } } }), settings);
    }
  }

  function reproduce() {
    const open = new Set([...document.querySelectorAll("#reproduce details[open]")].map((d) => d.dataset.label));
    $("reproduce-list").replaceChildren(...here().map((v) => {
      const copy = make("button", { type: "button", onclick: async () => {
        try { await navigator.clipboard.writeText(v.command); copy.textContent = "Copied"; } catch { copy.textContent = "Select it"; }
      } }, "Copy");
      return make("details", { "data-label": v.label, open: open.has(v.label) }, make("summary", {}, v.label),
        make("div", {}, make("div", { class: "command" }, make("pre", { class: "shell" }, v.command), copy),
          make("h3", {}, "Configuration"), make("pre", { tabindex: 0 }, JSON.stringify(v.config, null, 1)),
          make("h3", {}, "Versions and device"), make("pre", { tabindex: 0 }, JSON.stringify(v.environment, null, 1))));
    }));
  }

  // --- all of it

  function draw() {
    options($("setting"), data.settings.map((s) => [s, s]));
    const some = new Set(here().flatMap((v) => Object.keys(v.curves)));
    options($("measure"), Object.entries(data.measures).filter(([k]) => some.has(k)));
    document.body.classList.toggle("empty", !data.runs);
    for (const part of [overview, toggles, drawCurves, explorer, clients, studies, reproduce]) part();
  }

  function dark(flip) {
    const now = document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    if (!flip) return;
    document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
    try { localStorage.setItem("fedsap-theme", document.documentElement.dataset.theme); } catch { /* a page from a file may keep nothing */ }
    draw();
  }

  const place = (node) => {  // a selector that finds the node again in a page drawn anew
    if (!node || node === document.body) return "";
    if (node.id) return `#${CSS.escape(node.id)}`;
    const above = place(node.parentElement);
    return above && `${above} > :nth-child(${[...node.parentElement.children].indexOf(node) + 1})`;
  };

  async function poll() {
    try {
      const answer = await fetch(`data.json?since=${data.revision}`, { cache: "no-store" });
      if (answer.status === 200) {
        data = await answer.json();
        const focused = place(document.activeElement);
        const sorted = new Map([...document.querySelectorAll("#table-list article")].map((a) => [a.id, sortedBy(a.querySelector("table"))]));
        $("table-list").innerHTML = data.tables;
        document.querySelectorAll("#table-list article").forEach((a) => sortable(a.querySelector("table"), sorted.get(a.id)));
        draw();
        if (focused && document.activeElement === document.body) document.querySelector(focused)?.focus({ preventScroll: true });
      }
    } catch {
      $("summary").textContent = "The server does not answer; trying again.";
    }
    setTimeout(poll, 2000);
  }

  document.querySelectorAll("#table-list table").forEach((node) => sortable(node));
  draw();
  $("setting").addEventListener("change", () => { $("left").value = ""; draw(); });
  $("measure").addEventListener("change", drawCurves);
  $("band").addEventListener("change", drawCurves);
  $("theme").addEventListener("click", () => dark(true));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  for (const side of ["left", "right"]) $(side).addEventListener("change", () => explorer());
  $("round").addEventListener("input", () => drawPanels(true));
  $("play").addEventListener("click", play);
  $("sample").addEventListener("input", (event) => tellSample(Number(event.target.value), "left"));
  document.querySelectorAll("input[name=tint]").forEach((node) => node.addEventListener("change", () => drawPanels(false)));
  for (const id of ["client-method", "client-seed"]) $(id).addEventListener("change", clients);
  if (data.live) setTimeout(poll, 1000);
})();
