/* The page of an advice. Untrusted text is inserted as text, and reaches Plotly only through escaped(). */
"use strict";
(() => {
  const { element, escaped, counted, css } = Charts;
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("payload").textContent);
  const shown = (value, digits = 3) => (value === null || value === undefined ? "–" : String(Number(Number(value).toPrecision(digits))));
  const megabytes = (bytes) => (bytes === null ? "–" : `${shown(bytes / 1e6)} MB`);

  function head(...names) {
    return element("thead", {}, element("tr", {}, ...names.map(([name, kind]) => element("th", { scope: "col", class: kind || "" }, name))));
  }

  /* What the marks of the picture mean; the colour of those that reached the target is the worst decile. */
  const KINDS = {
    advised: { name: "advised", symbol: "star", size: 20, line: 1.8 },
    front: { name: "on the Pareto front", symbol: "circle", size: 14, line: 2.2 },
    raced: { name: "raced, not on the front", symbol: "circle", size: 8, line: 0 },
    missed: { name: "missed the target (lower bound)", symbol: "triangle-right-open", size: 11, line: 1.5 },
  };
  const SCALE = [[0, "#3b1c6b"], [0.3, "#31688e"], [0.6, "#21a685"], [1, "#c8d92e"]];
  const NAME = { size: 12, line: 15 };  // of a point, in pixels
  const drawing = { points: [], bounds: [], known: false };

  const kindOf = (row) => (row.missed ? "missed" : data.advised && row.rank === 1 ? "advised" : row.front ? "front" : "raced");
  const decile = (value) => Charts.score(value, data.metric);
  const seconds = (value) => `${value.toLocaleString("en", { maximumSignificantDigits: 6 })} s`;
  function bytes(value) {
    const [size, unit] = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [0, "B"]].find(([least]) => value >= least);
    return `${Number((value / (size || 1)).toPrecision(6))} ${unit}`;
  }
  const place = (row) => (row.missed ? [row.bound_seconds, row.bound_bytes] : [row.seconds_to_target, row.bytes]);

  function mark(row) {
    const kind = KINDS[kindOf(row)];
    const coloured = !row.missed && row.worst_decile !== null;
    return {
      size: kind.size, symbol: kind.symbol, opacity: 1, line: { width: kind.line, color: row.missed ? css("--muted") : css("--ink") },
      ...(coloured ? { color: [row.worst_decile], coloraxis: "coloraxis" } : { color: row.missed ? css("--muted") : css("--accent") }),
    };
  }

  function point(row) {
    const [x, y] = place(row);
    const what = row.missed ? `target: ${escaped(row.time, 120)}<br>more than %{x:.4g} s and ${bytes(y)}` : `%{x:.4g} s, ${bytes(Number(y.toPrecision(4)))}`;
    return {
      type: "scatter", mode: "markers", x: [x], y: [y], name: escaped(row.label), meta: row.missed ? "missed" : "reached", showlegend: false,
      error_x: row.missed || row.low === null ? undefined
        : { type: "data", symmetric: false, array: [row.high - x], arrayminus: [x - row.low], thickness: 1, color: css("--muted") },
      marker: mark(row), cliponaxis: false,
      hovertemplate: `${escaped(row.label, 90)}<br>${what}${row.worst_decile === null ? "" : `<br>worst decile ${decile(row.worst_decile)}`}<extra></extra>`,
    };
  }

  /* An entry of the legend: a trace without points. */
  function entry(kind) {
    const { name, symbol, size, line } = KINDS[kind];
    const marker = { symbol, size: Math.min(size, 14), color: css("--muted"), line: { width: line, color: kind === "missed" ? css("--muted") : css("--ink") } };
    return { type: "scatter", mode: "markers", x: [null], y: [null], name, meta: "legend", showlegend: true, marker, hoverinfo: "skip" };
  }

  function colourAxis(rows) {
    const values = rows.map((row) => row.worst_decile).filter((value) => value !== null);
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const margin = high > low ? 0 : 0.01;
    const bar = { thickness: 14, outlinewidth: 0, ticks: "outside", ticklen: 3, tickformat: data.metric === "accuracy" ? ".0%" : "", nticks: 6 };
    const beside = { ...bar, title: { text: "worst decile", side: "right" }, len: 1 };
    const below = { ...bar, title: { text: "worst decile", side: "top" }, orientation: "h", x: 0.5, xanchor: "center", y: -0.24, yanchor: "top", len: 0.9 };
    return { colorscale: SCALE, cmin: low - margin, cmax: high + margin, colorbar: Charts.narrow() ? below : beside };
  }

  function frontNote(unnamed) {
    const left = data.ranking.filter((row) => row.missed).length - drawing.bounds.length;
    const notes = [drawing.known
      ? "The colour of a point is its worst decile: the mean accuracy of the tenth of the clients with the lowest."
      : "The accuracy of the worst-served clients is unknown; set task.client_test_share to measure it."];
    if (drawing.bounds.length) notes.push("An open triangle is a candidate that had not reached the target by this time: its time and traffic to the target are higher.");
    if (left) notes.push(`Not shown: ${counted(left, "candidate")} that missed the target and diverged or stopped before the fastest time.`);
    if (unnamed) notes.push(`Without a name, for lack of room: ${counted(unnamed, "point")} on the front; the ranking has the name.`);
    return notes.join(" ");
  }

  /* The name of a point on the front: its place in the ranking and its algorithm. Below are the settings that tell it from the
     others of its algorithm, where a wide screen has room for them. */
  function nameOf(row) {
    const lines = [`${row.rank} ${row.algorithm}`, ...(Charts.narrow() ? [] : Front.wrap(row.name, 40))].map((text) => escaped(text));
    const pen = nameOf.pen || (nameOf.pen = document.createElement("canvas").getContext("2d"));
    pen.font = `600 ${NAME.size}px ${getComputedStyle(document.body).fontFamily}`;
    return {
      text: [`<b>${lines[0]}</b>`, ...lines.slice(1)].join("<br>"),
      width: Math.max(...lines.map((text) => pen.measureText(text).width)) + 4, height: NAME.line * lines.length,
    };
  }

  /* Ticks and names depend on the size of the picture, which is known when it is drawn. */
  function annotate(chart) {
    const { xaxis, yaxis } = chart._fullLayout;
    const [x, y] = [xaxis, yaxis].map((axis) => (value) => axis.l2p(Math.log10(value)));
    const box = { width: xaxis._length, height: yaxis._length };
    const marks = [...drawing.points, ...drawing.bounds].flatMap((row) => {
      const [at, size] = [place(row), KINDS[kindOf(row)].size + 2];
      const spot = { x: x(at[0]), y: y(at[1]) };
      const interval = row.missed || row.low === null ? [] : [{ x: (x(row.low) + x(row.high)) / 2, y: spot.y, width: x(row.high) - x(row.low), height: 8 }];
      return [{ ...spot, width: size, height: size }, ...interval];
    });
    const named = drawing.points.filter((row) => row.front).map((row) => {
      const [at, name] = [place(row), nameOf(row)];
      return { row, ...name, x: x(at[0]), y: y(at[1]), radius: KINDS[kindOf(row)].size / 2 };
    }).filter((label) => label.x >= 0 && label.x <= box.width && label.y >= 0 && label.y <= box.height);
    const spots = Front.place(named, marks, box);
    const annotations = named.flatMap((label, i) => (spots[i] === null ? [] : [{
      x: Math.log10(place(label.row)[0]), y: Math.log10(place(label.row)[1]), ax: spots[i].x - label.x, ay: spots[i].y - label.y,
      xanchor: "center", yanchor: "middle", text: label.text, font: { size: NAME.size, color: css("--ink") }, borderpad: 0,
      showarrow: true, arrowhead: 0, arrowwidth: 1, arrowcolor: css("--muted"), standoff: label.radius + 1,
    }]));
    $("front-note").textContent = frontNote(named.length - annotations.length);
    const changes = { annotations };
    const letters = seconds(Number((10 ** xaxis.range[1]).toPrecision(1))).length;
    for (const [name, axis, text, pixels, gap] of [["xaxis", xaxis, seconds, box.width, 8 * letters + 12], ["yaxis", yaxis, bytes, box.height, 34]]) {
      const values = Front.ticks(10 ** axis.range[0], 10 ** axis.range[1], pixels, gap);
      Object.assign(changes, { [`${name}.tickvals`]: values, [`${name}.ticktext`]: values.map(text) });
    }
    return Plotly.relayout(chart, changes);
  }

  function front() {
    const points = data.ranking.filter((row) => !row.missed);
    if (!points.length) {
      $("front").textContent = "No candidate reached the target on all its seeds, so there is no time to compare. The ranking shows how far each came.";
      $("front-note").closest("p").hidden = true;
      return Promise.resolve();
    }
    // A bound below the fastest time would be drawn on the side of the better candidates, and says nothing.
    const fastest = Math.min(...points.map((row) => row.seconds_to_target));
    const bounds = data.ranking.filter((row) => row.missed && row.bound_seconds !== null && row.bound_seconds >= fastest);
    Object.assign(drawing, { points, bounds, known: points.some((row) => row.worst_decile !== null) });
    const rows = [...bounds, ...points.slice().reverse()];  // the best are drawn last, on top of the others
    const times = [...rows.map((row) => place(row)[0]), ...points.flatMap((row) => (row.low === null ? [] : [row.low, row.high]))];
    const kinds = Object.keys(KINDS).filter((kind) => rows.some((row) => kindOf(row) === kind));
    const legend = { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", itemclick: false, itemdoubleclick: false, font: { size: 13 } };
    $("front").setAttribute("aria-label", `Time to ${data.target} against traffic. On the Pareto front: ${points.filter((row) => row.front)
      .map((row) => `${row.label} (${row.time}, ${bytes(Number(row.bytes.toPrecision(3)))}${row.worst_decile === null ? "" : `, worst decile ${decile(row.worst_decile)}`})`).join("; ")}`);
    const axis = (title, values) => ({ type: "log", title: { text: title }, range: Front.range(values), tickmode: "array" });
    return Charts.draw("front", [...rows.map(point), ...kinds.map(entry)], {
      xaxis: axis(`simulated time to ${escaped(data.target)}`, times), yaxis: axis("traffic until then, up and down", rows.map((row) => place(row)[1])),
      showlegend: true, legend, height: 560, ...(drawing.known ? { coloraxis: colourAxis(points) } : {}),
    }).then((chart) => {
      if (!chart.watched) chart.on("plotly_relayout", (event) => { if (Object.keys(event).some((key) => /range|autosize/.test(key))) annotate(chart); });
      chart.watched = true;
      return annotate(chart);
    });
  }

  function ranking() {
    const first = data.advised ? "★ advised" : "best so far; not advised";
    const rows = data.ranking.map((row) => element("tr", data.advised && row.rank === 1 ? { class: "best" } : {},
      element("td", { class: "number" }, String(row.rank)),
      element("th", { scope: "row" }, row.label, row.front ? element("span", { class: "badge front" }, "● on the front") : null),
      element("td", row.missed ? { class: "missed" } : {}, row.time),
      element("td", { class: "number" }, String(row.seeds)),
      element("td", { class: "number" }, megabytes(row.bytes)),
      element("td", { class: "number" }, decile(row.worst_decile)),
      element("td", { class: "number" }, shown(row.staleness)),
      element("td", { class: "number" }, shown(row.steps_per_second)),
      element("td", { class: "wide" }, row.rank === 1 ? first : row.reason)));
    $("ranking").replaceChildren(
      head(["", "number"], ["candidate"], ["time to target"], ["seeds", "number"], ["traffic", "number"], ["worst decile", "number"],
        ["staleness", "number"], ["steps/s", "number"], ["why not"]),
      element("tbody", {}, ...rows));
  }

  function dropped() {
    $("dropped-count").textContent = data.dropped_note;
    $("dropped").replaceChildren(
      head(["reason"], ["settings", "number"], ["for example"]),
      element("tbody", {}, ...data.dropped.map((group) => element("tr", {},
        element("td", { class: "wide" }, group.reason), element("td", { class: "number" }, String(group.count)),
        element("td", {}, group.example)))));
  }

  function list(target, entries) {
    target.replaceChildren(...entries.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, String(value))]));
  }

  $("title").textContent = data.title;
  $("conclusion").textContent = data.conclusion;
  list($("facts"), data.facts);
  list($("provenance"), data.provenance);
  ranking();
  dropped();
  Charts.themeButton($("theme"), front);
  front().then(() => { document.documentElement.dataset.ready = "yes"; });
})();
