// Run in a page: the pieces of text that are cut, or lie over each other. Of plots: titles, ticks, notes and legends. Of tables: what
// has no tooltip that holds all of it.
() => {
  const found = [], isSeen = (at) => at.checkVisibility({ visibilityProperty: true, opacityProperty: true });
  for (const plot of document.querySelectorAll(".js-plotly-plot")) {
    const box = plot.closest(".saved-plot").getBoundingClientRect(), texts = [];
    for (const text of plot.querySelectorAll(".main-svg text")) {
      const at = text.getBoundingClientRect();
      if (!text.textContent.trim() || !at.width || !isSeen(text) || text.closest(".hoverlayer, .sizing_box")) continue;
      const name = `${plot.parentElement.id}: ${text.textContent.slice(0, 60)}`;
      if (at.left < box.left - 2 || at.right > box.right + 2 || at.top < box.top - 2 || at.bottom > box.bottom + 2) found.push(`cut ${name}`);
      texts.push([at, name]);
    }
    const bar = plot.querySelector(".legend .scrollbar");
    if (bar && bar.getBoundingClientRect().height > 1) found.push(`the legend of ${plot.parentElement.id} scrolls`);
    texts.forEach(([a, name], i) => texts.slice(0, i).forEach(([b, other]) => {
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left), down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 2 && down > 4) found.push(`${name} lies over ${other}`);
    }));
  }
  const withTips = ["message", "finding", "what", "name", "module", "others", "cheaper", "problems"];
  for (const cell of document.querySelectorAll(".ag-cell-value")) {
    const column = cell.closest("[col-id]").getAttribute("col-id");
    if (cell.scrollWidth > cell.clientWidth + 1 && !withTips.includes(column)) found.push(`cut ${column}: ${cell.textContent}`);
  }
  return found;
}
