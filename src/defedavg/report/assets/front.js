/* Ticks of logarithmic axes and places of names beside points, in pixels: nothing here needs a page. */
"use strict";
const Front = (() => {
  const STEPS = [[1, 2, 5], [1, 3], [1], [1, 1.5, 2, 3, 5, 7], [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8]];
  const ENOUGH = 4;  // ticks of an axis
  const DISTANCES = [3, 12, 24, 40, 60, 85, 115, 150, 190, 240, 300];  // from a point to its name
  const DIRECTIONS = [[1, 0], [1, -1], [1, 1], [0, -1], [0, 1], [-1, 0], [-1, -1], [-1, 1],
    [0.5, -1], [0.5, 1], [-0.5, -1], [-0.5, 1], [1, -0.5], [1, 0.5], [-1, -0.5], [-1, 0.5]];
  const GAP = 3;  // between names
  const SAMPLES = 16;  // of the line from a point to its name

  const clean = (value) => Number(value.toPrecision(12));

  function inDecades(steps, low, high) {
    const found = [];
    for (let k = Math.floor(Math.log10(low)); k <= Math.ceil(Math.log10(high)); k += 1) {
      found.push(...steps.map((step) => clean(step * 10 ** k)).filter((value) => value >= low && value <= high));
    }
    return found;
  }

  /* Multiples of a round step, for an axis that is too short for the steps of a decade. */
  function multiples(low, high) {
    const sizes = [-3, -2, -1, 0].flatMap((k) => [1, 2, 5].map((step) => step * 10 ** (k + Math.floor(Math.log10(high)))));
    return sizes.filter((size) => (high - low) / size <= 12).map((size) => {
      const first = Math.ceil(low / size - 1e-9);
      return Array.from({ length: Math.floor(high / size + 1e-9) - first + 1 }, (_, i) => clean((first + i) * size));
    });
  }

  /* Ticks between low and high on an axis of so many pixels, the nearest at least `gap` pixels apart. */
  function ticks(low, high, pixels, gap) {
    const fits = (values) => values.slice(1).every((value, i) => pixels * Math.log(value / values[i]) >= gap * Math.log(high / low));
    const found = [...STEPS.map((steps) => inDecades(steps, low, high)), ...multiples(low, high)].filter(fits);
    return found.find((values) => values.length >= ENOUGH) || found.reduce((a, b) => (b.length > a.length ? b : a), []);
  }

  /* The ends of a logarithmic axis around values, as logarithms, with room for marks and names. */
  function range(values) {
    const logs = values.map(Math.log10);
    const [low, high] = [Math.min(...logs), Math.max(...logs)];
    const margin = Math.max(0.1 * (high - low), 0.05);
    return [low - margin, high + margin];
  }

  /* A text in lines of at most so many letters, where its words are no longer. */
  function wrap(text, limit) {
    const lines = [];
    for (const word of text.split(" ").filter(Boolean)) {
      if (lines.length && lines.at(-1).length + word.length < limit) lines.push(`${lines.pop()} ${word}`);
      else lines.push(word);
    }
    return lines;
  }

  const overlap = (a, b, gap) =>
    Math.abs(a.x - b.x) < (a.width + b.width) / 2 + gap && Math.abs(a.y - b.y) < (a.height + b.height) / 2 + gap;
  const within = (a, box) =>
    a.x - a.width / 2 >= 0 && a.x + a.width / 2 <= box.width && a.y - a.height / 2 >= 0 && a.y + a.height / 2 <= box.height;

  function line(label, at) {
    return Array.from({ length: SAMPLES }, (_, i) => {
      const share = (i + 1) / (SAMPLES + 1);
      return { x: label.x + share * (at.x - label.x), y: label.y + share * (at.y - label.y), width: 1, height: 1 };
    });
  }

  /* The nearest centre for a name that covers no mark, no other name and no line to one; null without room in the box. */
  function spot(label, names, lines, marks, box) {
    for (const distance of DISTANCES) {
      for (const [dx, dy] of DIRECTIONS) {
        const away = label.radius + distance;
        const [x, y] = [label.x + dx * (away + label.width / 2), label.y + dy * (away + label.height / 2)];
        const at = { x, y, width: label.width, height: label.height, distance };
        if (within(at, box) && ![...names, ...marks].some((other) => overlap(at, other, GAP)) && !lines.some((dot) => overlap(at, dot, 1))
          && !line(label, at).some((dot) => names.some((other) => overlap(dot, other, 1)))) return at;
      }
    }
    return null;
  }

  function placeInTurn(labels, order, marks, box) {
    const [names, lines, spots] = [[], [], labels.map(() => null)];
    for (const i of order) {
      spots[i] = spot(labels[i], names, lines, marks, box);
      if (spots[i] === null) continue;
      names.push(spots[i]);
      lines.push(...line(labels[i], spots[i]));
    }
    return spots;
  }

  /* Centres for names {x, y, radius, width, height} of points, or null where a name has no room in the box. One that is placed
     early may take the room of others, so several orders are tried. */
  function place(labels, marks, box) {
    const given = labels.map((_, i) => i);
    const by = (value) => given.slice().sort((i, j) => value(labels[i]) - value(labels[j]));
    const orders = [given, by((l) => l.x), by((l) => -l.x), by((l) => l.y), by((l) => -l.y), given.slice().reverse()];
    const cost = (spots) => spots.reduce((sum, at) => sum + (at === null ? 1e6 : at.distance), 0);
    const tried = orders.map((order) => placeInTurn(labels, order, marks, box));
    return tried.reduce((a, b) => (cost(b) < cost(a) ? b : a)).map((at) => (at === null ? null : { x: at.x, y: at.y }));
  }

  return { place, range, ticks, wrap };
})();
