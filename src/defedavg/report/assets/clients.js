/* What each client gets: a table over clients, and the metric against speed, training samples and participation. */
"use strict";
const Clients = (() => {
  const { colour, narrow, escaped, element, swatch, draw, withOpacity, score, counted } = Charts;
  const $ = (id) => document.getElementById(id);
  const COLUMNS = [
    ["client_accuracy_mean", "mean"], ["client_accuracy_worst_decile", "worst decile"], ["client_accuracy_best_decile", "best decile"],
    ["client_accuracy_worst", "worst client"], ["client_accuracy_spread", "spread"],
  ];
  const CORRELATIONS = [
    ["client_correlation_slowness", "ρ slowness"], ["client_correlation_samples", "ρ samples"],
    ["client_correlation_updates", "ρ updates"],
  ];
  const WIDE = 50; // a range of values with a larger ratio has a logarithmic axis
  const AXES = {
    slowness: ["seconds that a client needs to answer (slower →)", "s to answer"],
    samples: ["training samples of the client", "samples"],
    updates: ["merged updates of the client, relative to the mean client", "× the mean number of updates"],
  };

  /* Algorithms merge very different numbers of updates, so participation is relative to the mean of a setting. */
  function positions(s, name) {
    const found = s.clients.points[name].x;
    const mean = found.reduce((sum, value) => sum + value, 0) / found.length;
    return name === "updates" && mean > 0 ? found.map((value) => value / mean) : found;
  }

  const correlation = (value) => (Number.isFinite(value) ? value.toFixed(2).replace("-", "−") : "–");

  function table(series, metric) {
    const cells = (s) => [
      ...COLUMNS.map(([key]) => score(s.clients.figures[key], metric)),
      ...CORRELATIONS.map(([key]) => correlation(s.clients.figures[key])),
    ];
    const names = [...COLUMNS, ...CORRELATIONS].map(([, name]) => name);
    $("clients-table").replaceChildren(
      element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "setting"),
        ...names.map((name) => element("th", { scope: "col", class: "number" }, name)))),
      element("tbody", {}, ...series.map((s) => element("tr", {},
        element("th", { scope: "row" }, element("span", { class: "name-cell" }, swatch(s.look), element("span", { title: s.name }, s.name))),
        ...cells(s).map((text) => element("td", { class: "number" }, text))))));
  }

  function chart(name, series, metric) {
    const target = $(`clients-${name}`);
    const drawn = series.filter((s) => s.clients.points[name]);
    target.parentElement.hidden = !drawn.length;
    if (!drawn.length) return;
    const [title, unit] = AXES[name];
    const percentages = metric === "accuracy";
    const traces = drawn.map((s) => ({
      type: "scatter", mode: "markers", x: positions(s, name), y: s.clients.points[name].y, name: escaped(s.name),
      marker: { color: withOpacity(colour(s.look), 0.75), symbol: s.look.symbol, size: 7 },
      hovertemplate: `%{fullData.name}<br>%{x:.4g} ${unit}: ${percentages ? "%{y:.1%}" : "%{y:.4g}"}<extra></extra>`,
    }));
    const values = drawn.flatMap((s) => positions(s, name));
    const wide = Math.min(...values) > 0 && Math.max(...values) > WIDE * Math.min(...values);
    target.setAttribute("aria-label", `${metric} of clients by ${unit}, ${counted(drawn.length, "setting")}`);
    draw(target, traces, {
      height: narrow() ? 300 : 360,
      xaxis: { title: { text: title, standoff: 8 }, type: wide ? "log" : "linear" },
      yaxis: { title: { text: escaped(`${metric} on the client's own data`), standoff: 8 }, tickformat: percentages ? ".0%" : undefined },
    });
  }

  function show(group, shown) {
    const all = group.series.filter((s) => s.clients);
    $("clients-section").hidden = !all.length;
    if (!all.length) return;
    const series = shown.filter((s) => s.clients).sort((a, b) => a.rank - b.rank);
    table(series, group.metric);
    const ofClients = all.every((s) => s.clients.of_clients);
    $("clients-who").textContent = ofClients ? "every client" : "every test user; these are not clients, so they have no speed";
    const { clients_evaluated: tested, clients_left_out: left } = all[0].clients.figures;
    $("clients-note").textContent = `${counted(Math.round(tested), ofClients ? "client" : "test user")} evaluated.` +
      (left ? ` ${counted(Math.round(left), "client")} without a test sample left out.` : "");
    const points = series.flatMap((s) => Object.values(s.clients.points)).filter((p) => p);
    $("clients-charts").hidden = $("clients-charts-how").hidden = !points.length;
    const per = Math.max(1, ...points.map((p) => p.clients_per_point));
    $("clients-point").textContent = per > 1 ? `the mean of up to ${per} clients with neighbouring values` : "a client";
    for (const name of Object.keys(AXES)) chart(name, series, group.metric);
  }

  return { show };
})();
