/* The page of an advice. Untrusted text is inserted as text, and reaches Plotly only through escaped(). */
"use strict";
(() => {
  const { element, escaped, colour, counted, css } = Charts;
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("payload").textContent);
  const shown = (value, digits = 3) => (value === null || value === undefined ? "–" : String(Number(Number(value).toPrecision(digits))));
  const megabytes = (bytes) => (bytes === null ? "–" : `${shown(bytes / 1e6)} MB`);

  function head(...names) {
    return element("thead", {}, element("tr", {}, ...names.map(([name, kind]) => element("th", { scope: "col", class: kind || "" }, name))));
  }

  /* A candidate that reached the target on every seed. */
  function reachedPoint(row) {
    return {
      type: "scatter", mode: "markers", x: [row.seconds_to_target], y: [row.bytes / 1e6], name: escaped(row.label), meta: "reached",
      error_x: row.low === null ? undefined
        : { type: "data", symmetric: false, array: [row.high - row.seconds_to_target], arrayminus: [row.seconds_to_target - row.low], thickness: 1 },
      marker: {
        size: row.rank === 1 ? 16 : 10, color: colour(row.look), symbol: row.look.symbol,
        line: { width: row.front ? 2.5 : 0, color: css("--ink") },
      },
      hovertemplate: `${escaped(row.label, 90)}<br>%{x:.4g} s, %{y:.4g} MB`
        + `${row.worst_decile === null ? "" : `<br>worst decile ${shown(row.worst_decile)}`}<extra></extra>`,
    };
  }

  /* A candidate that missed the target: only lower bounds of its time and traffic are known. */
  function missedPoint(row) {
    return {
      type: "scatter", mode: "markers+text", x: [row.bound_seconds], y: [row.bound_bytes / 1e6], name: escaped(row.label), meta: "missed",
      text: ["not reached"], textposition: "top center", textfont: { size: 11, color: css("--muted") }, cliponaxis: false,
      marker: { size: 11, color: colour(row.look), symbol: "triangle-right-open", line: { width: 1.5 } },
      hovertemplate: `${escaped(row.label, 90)}<br>target: ${escaped(row.time, 120)}<br>more than %{x:.4g} s and %{y:.4g} MB<extra></extra>`,
    };
  }

  function frontNote(known, drawn, left) {
    const notes = [known
      ? "The label of a point shows the worst decile: the mean accuracy of the tenth of the clients with the lowest."
      : "The accuracy of the worst-served clients is unknown; set task.client_test_share to measure it."];
    if (drawn) notes.push("An open triangle with the words “not reached” is a candidate that had not reached the target by this time: its time and traffic to the target are higher.");
    if (left) notes.push(`Not shown: ${counted(left, "candidate")} that missed the target and diverged or stopped before the fastest time.`);
    return notes.join(" ");
  }

  function front() {
    const points = data.ranking.filter((row) => !row.missed);
    const missed = data.ranking.filter((row) => row.missed);
    if (!points.length) {
      $("front").textContent = "No candidate reached the target on all its seeds, so there is no time to compare. The ranking shows how far each came.";
      return;
    }
    // A bound below the fastest time would be drawn on the side of the better candidates, and says nothing.
    const fastest = Math.min(...points.map((row) => row.seconds_to_target));
    const bounds = missed.filter((row) => row.bound_seconds !== null && row.bound_seconds >= fastest);
    $("front-note").textContent = frontNote(points.some((row) => row.worst_decile !== null), bounds.length, missed.length - bounds.length);
    Charts.draw("front", [...points.map(reachedPoint), ...bounds.map(missedPoint)], {
      xaxis: { type: "log", title: { text: "simulated seconds to the target" } },
      yaxis: { type: "log", title: { text: "megabytes, up and down, until then" } },
    });
  }

  function ranking() {
    const first = data.advised ? "★ advised" : "best so far; not advised";
    const rows = data.ranking.map((row) => element("tr", data.advised && row.rank === 1 ? { class: "best" } : {},
      element("td", { class: "number" }, String(row.rank)),
      element("th", { scope: "row" }, row.label),
      element("td", row.missed ? { class: "missed" } : {}, row.time),
      element("td", { class: "number" }, String(row.seeds)),
      element("td", { class: "number" }, megabytes(row.bytes)),
      element("td", { class: "number" }, shown(row.worst_decile)),
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
  front();
  document.documentElement.dataset.ready = "yes";
})();
