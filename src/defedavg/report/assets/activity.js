/* The chart of client activity: a row per client, a bar per job, a line per merge. */
"use strict";
const Activity = (() => {
  const { css, narrow, element, draw, digits } = Charts;
  const $ = (id) => document.getElementById(id);

  const stalenessScale = () => (Charts.dark()
    ? [[0, "#5aa9f0"], [0.5, "#f2d06b"], [1, "#f0622e"]] : [[0, "#2f7fd0"], [0.5, "#f0bf3c"], [1, "#c23b12"]]);

  /* The colour of a staleness. Plotly's own mapping of bars logs a warning for each of them. */
  function stalenessColour(staleness, highest) {
    const scale = stalenessScale();
    const share = highest ? Math.min(staleness / highest, 1) : 0;
    const k = share <= 0.5 ? 0 : 1;
    const part = (share - scale[k][0]) / 0.5;
    const channels = [1, 3, 5].map((i) => {
      const [from, to] = [scale[k], scale[k + 1]].map(([, hex]) => parseInt(hex.slice(i, i + 2), 16));
      return Math.round(from + part * (to - from));
    });
    return `rgb(${channels.join(",")})`;
  }

  /* The spans in which a client neither trains, uploads nor is absent. */
  function idleSpans(chart) {
    const busy = chart.clients.map(() => []);
    for (const spans of [chart.jobs, chart.uploads, chart.absences]) {
      spans.row.forEach((row, k) => busy[row].push([spans.start[k], spans.end[k]]));
    }
    const idle = { row: [], start: [], end: [] };
    busy.forEach((spans, row) => {
      let busyUntil = 0;
      for (const [start, end] of [...spans.sort((a, b) => a[0] - b[0]), [chart.until, chart.until]]) {
        if (start > busyUntil) {
          idle.row.push(row);
          idle.start.push(busyUntil);
          idle.end.push(start);
        }
        busyUntil = Math.max(busyUntil, end);
      }
    });
    return idle;
  }

  const indices = (spans) => spans.row.map((_, k) => k);

  const bars = (spans, kept) => ({
    type: "bar", orientation: "h", y: kept.map((k) => spans.row[k]), base: kept.map((k) => spans.start[k]),
    x: kept.map((k) => spans.end[k] - spans.start[k]),
  });

  function barTraces(chart, highest) {
    const { jobs, uploads, absences } = chart;
    const used = indices(jobs).filter((k) => jobs.staleness[k] >= 0);
    const unused = indices(jobs).filter((k) => jobs.staleness[k] < 0);
    const details = (kept, use) => kept.map((k) => [chart.clients[jobs.row[k]], jobs.version[k], use(k), jobs.start[k], jobs.end[k]]);
    const hovertemplate = "client %{customdata[0]}, from version %{customdata[1]}<br>%{customdata[2]}<br>" +
      "%{customdata[3]:.4g} to %{customdata[4]:.4g} s<extra></extra>";
    const idle = idleSpans(chart);
    const traces = [
      { ...bars(idle, indices(idle)), width: 0.1, name: "idle", hovertemplate: "idle<extra></extra>",
        marker: { color: css("--line") } },
      { ...bars(jobs, used), width: 0.68, offset: -0.42, name: "training", hovertemplate,
        customdata: details(used, (k) => `staleness ${jobs.staleness[k]} when merged`),
        marker: { color: used.map((k) => stalenessColour(jobs.staleness[k], highest)), line: { color: css("--ground"), width: 0.6 } } },
      { ...bars(jobs, unused), width: 0.68, offset: -0.42, name: "training not merged", hovertemplate,
        customdata: details(unused, () => "not merged"),
        marker: { color: css("--card"), line: { color: css("--muted"), width: 0.7 },
          pattern: { shape: "/", fgcolor: css("--muted"), bgcolor: css("--card"), size: 5, solidity: 0.25 } } },
      { ...bars(uploads, indices(uploads)), width: 0.16, offset: 0.29, name: "upload",
        marker: { color: css("--ink") }, hovertemplate: "upload<extra></extra>" },
    ];
    if (absences.row.length) {
      traces.push({ ...bars(absences, indices(absences)), width: 0.3, offset: -0.15, name: "absent",
        marker: { color: css("--warn"), opacity: 0.5 }, hovertemplate: "absent<extra></extra>" });
    }
    return traces;
  }

  const mergeLines = (chart) => ({
    type: "scatter", mode: "lines", name: "merge", hoverinfo: "skip", line: { color: css("--muted"), width: 0.8 },
    opacity: chart.merges.length > 150 ? 0.25 : 0.7, x: chart.merges.flatMap((time) => [time, time, null]),
    y: chart.merges.flatMap(() => [-0.6, chart.clients.length - 0.4, null]),
  });

  /* A trace without points that carries the colour scale. */
  const colourScale = (highest) => ({
    type: "scatter", mode: "markers", x: [null], y: [null], name: "scale", hoverinfo: "skip",
    marker: {
      color: [0], colorscale: stalenessScale(), cmin: 0, cmax: highest, showscale: true,
      colorbar: {
        orientation: "h", y: 1.0, yanchor: "bottom", x: 1, xanchor: "right", len: narrow() ? 0.9 : 0.35, thickness: 10,
        lenmode: "fraction", outlinewidth: 0, tick0: 0, dtick: Math.ceil(highest / 5), ticklabelposition: "outside top",
        title: { text: "staleness when merged", side: "top", font: { size: 12 } },
      },
    },
  });

  function keys(chart) {
    const entries = [
      ["training", `linear-gradient(90deg, ${stalenessScale().map(([, c]) => c).join(", ")})`],
      ["training not merged", `repeating-linear-gradient(135deg, ${css("--muted")} 0 1px, ${css("--card")} 1px 5px)`],
      ["upload", css("--ink"), "4px"], ["idle", css("--line"), "3px"],
      ...(chart.absences.row.length ? [["absent", css("--warn")]] : []), ["merge (vertical line)", css("--muted"), "1px"],
    ];
    return entries.map(([text, background, height]) => {
      const box = element("i");
      box.style.background = background;
      if (height) box.style.height = height;
      return element("li", {}, box, text);
    });
  }

  function show(chart, name) {
    const rows = chart.clients.length;
    const highest = Math.max(1, ...chart.jobs.staleness);
    $("activity").setAttribute("aria-label", `Activity of ${rows} clients of ${name} over time`);
    draw($("activity"), [...barTraces(chart, highest), mergeLines(chart), colourScale(highest)], {
      barmode: "overlay", height: Math.max(300, 120 + rows * (narrow() ? 17 : 22)),
      margin: { l: 64, r: 14, t: 66, b: 58 }, dragmode: narrow() ? false : "pan",
      xaxis: { title: { text: Charts.AXES.seconds, standoff: 20 }, range: [0, chart.first_view], minallowed: 0, maxallowed: chart.until * 1.01 },
      yaxis: {
        range: [rows - 0.4, -0.6], tickvals: chart.clients.map((_, row) => row), fixedrange: true, showgrid: false, zeroline: false,
        ticktext: chart.clients.map((client) => `client ${client}`), tickfont: { size: narrow() ? 10 : 12 },
      },
    });
    $("activity-keys").replaceChildren(...keys(chart));
    const clients = rows < chart.of ? `${rows} of ${chart.of} clients` : `all ${chart.of} clients`;
    const order = chart.by_speed ? ", from the fastest (top) to the slowest" : "";
    const time = chart.until < chart.end ? `, in the first ${digits(chart.until, 3)} of ${digits(chart.end, 3)} s` : "";
    $("activity-note").textContent = `The chart shows ${clients}${order}${time}. Drag to move, or use the buttons.`;
  }

  function zoom(chart, direction) {
    const [low, high] = $("activity").layout.xaxis.range.map(Number);
    const [middle, half] = [(low + high) / 2, (high - low) / 2];
    const whole = chart.until / 2;
    const newHalf = { in: half / 2, out: Math.min(half * 2, whole), left: half, right: half, all: whole }[direction];
    const wanted = { in: middle, out: middle, left: middle - half, right: middle + half, all: whole }[direction];
    const centre = Math.min(Math.max(wanted, newHalf), Math.max(newHalf, chart.until - newHalf));
    Plotly.relayout($("activity"), { "xaxis.range": [centre - newHalf, centre + newHalf] });
  }

  return { show, zoom };
})();
