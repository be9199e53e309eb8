// What runs in the browser: controls write the URL, "/" finds a module, and cells of grids show text, never HTML.
(function () {
  const go = (pathname, search) => window.dash_clientside.set_props("url", { pathname, search });

  // Sets the query's keys; what is null, empty or default is left out.
  const changed = (search, values) => {
    const params = new URLSearchParams(search || "");
    for (const [key, value] of Object.entries(values)) {
      if (value === null || value === undefined || value === "") params.delete(key);
      else params.set(key, value);
    }
    const text = params.toString();
    return text ? "?" + text : "";
  };

  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    fp8debug: {
      sync(values, ids, search) {
        const wanted = {};
        ids.forEach((id, i) => { wanted[id.control] = String(values[i] ?? "") === String(id.default) ? null : values[i]; });
        const next = changed(search, wanted);
        const same = new URLSearchParams(next).toString() === new URLSearchParams(search || "").toString();
        return same ? window.dash_clientside.no_update : next;
      },
      pause(follow) { return !follow; },
      open_module(name, search) {
        const none = window.dash_clientside.no_update;
        const params = new URLSearchParams(search || "");
        if (!name || (params.get("module") === name && window.location.pathname === "/module")) return [none, none];
        return ["/module", changed(search, { module: name })];
      },
      // A box drawn in the heatmap asks for its steps at full resolution; a double click takes the range away again.
      zoom(change, search) {
        const none = window.dash_clientside.no_update;
        if (!change) return none;
        const ends = ["xaxis.range[0]", "xaxis.range[1]"].map((key) => Number(change[key]));
        let wanted = null;
        if (ends.every(Number.isFinite)) {
          wanted = { from: Math.max(0, Math.ceil(Math.min(...ends))), to: Math.max(0, Math.floor(Math.max(...ends))) };
          if (wanted.to < wanted.from) return none;
        } else if (change["xaxis.autorange"]) wanted = { from: null, to: null };
        if (!wanted) return none;
        const next = changed(search, wanted);
        return next === (search || "") ? none : next;
      },
      compare(rows) {
        const none = window.dash_clientside.no_update;
        if (!rows || rows.length < 2) return "choose two or more to compare them";
        const names = rows.map((row) => row.name);
        const search = changed("", { run: names[0], with: names.slice(1).join("/") });
        const link = { href: "/compare" + search, children: "compare " + names.join(" with ") };
        return { namespace: "dash_core_components", type: "Link", props: link };
      },
      open_run(name, search) {
        const params = new URLSearchParams(search || "");
        if (!name || params.get("run") === name) return window.dash_clientside.no_update;
        return changed("", { run: name });
      },
    },
  });

  const grid = (window.dashAgGridComponentFunctions = window.dashAgGridComponentFunctions || {});
  grid.Link = function (props) {
    const target = props.data.href;
    if (!target || !target.startsWith("/")) return String(props.value ?? "");
    const follow = (event) => {
      if (event.metaKey || event.ctrlKey || event.shiftKey) return;
      event.preventDefault();
      const [pathname, search] = target.split(/(?=\?)/);
      go(pathname, search || "");
    };
    return window.React.createElement("a", { href: target, onClick: follow }, String(props.value ?? ""));
  };
  grid.Severity = function (props) {
    const icon = window.React.createElement("span", { className: "icon", "aria-hidden": true }, props.data.icon);
    return window.React.createElement("span", { className: "badge badge-" + props.value }, icon,
      window.React.createElement("span", null, props.data.word));
  };

  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName) || event.target.isContentEditable;
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const search = document.getElementById("module-search");
    if (event.key === "/" && search) { event.preventDefault(); search.focus(); search.click(); }
    const neighbour = { "[": ".neighbour-before a", "]": ".neighbour-after a" }[event.key];
    const link = neighbour && document.querySelector(neighbour);
    if (link) link.click();
  });

  // Files: a table as CSV, a plot as PNG on the page's own background.
  const save = (text, name) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    link.download = name + ".csv";
    link.click();
    URL.revokeObjectURL(link.href);
  };
  // A spreadsheet runs a cell that begins with one of these; a number may.
  const cell = (text) => {
    const safe = /^[=+\-@\t\r]/.test(text) && Number.isNaN(Number(text)) ? "'" + text : text;
    return /[",\n\r]/.test(safe) ? '"' + safe.replace(/"/g, '""') + '"' : safe;
  };
  const tableCsv = (table) => Array.from(table.rows, (row) =>
    Array.from(row.cells, (one) => cell(one.textContent.trim())).join(",")).join("\n") + "\n";
  const savePng = (id) => {
    const plot = document.querySelector(`[id="${id}"] .js-plotly-plot`);
    const style = getComputedStyle(document.body);
    const layout = { ...plot.layout, paper_bgcolor: style.backgroundColor, font: { ...plot.layout.font, color: style.color } };
    window.Plotly.downloadImage({ data: plot.data, layout },
      { format: "png", scale: 2, filename: id, width: plot.clientWidth, height: plot.clientHeight });
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest && event.target.closest("button.save");
    if (!button) return;
    const { png, csv, csvGrid } = button.dataset;
    if (png) savePng(png);
    else if (csv) save(tableCsv(button.parentElement.querySelector("table")), csv);
    else if (csvGrid) window.dash_ag_grid.getApi(csvGrid).exportDataAsCsv({
      fileName: csvGrid + ".csv", processCellCallback: (one) => String(one.value ?? "").replace(/^(?=[=+@\t\r]|-\D)/, "'") });
  });
})();
