// WCAG 2.2 contrast of what is on a page. Without an argument: a list of what lies below AA (4.5 to 1 for text, 3 to 1 for large text
// and for the icons of plots), each as [text, element, ratio]. With a box of plotly's hover layer: the ratios of its words.
(box) => {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const pen = canvas.getContext("2d", { willReadFrequently: true }), known = new Map();
  const rgba = (color) => {
    if (!known.has(color)) {
      pen.clearRect(0, 0, 1, 1);
      pen.fillStyle = color;
      pen.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
      known.set(color, [r, g, b, a / 255]);
    }
    return known.get(color);
  };
  const over = ([r, g, b, a], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a), 1];
  const parents = (at) => { const found = []; for (let one = at; one; one = one.parentElement) found.push(one); return found; };
  const behind = (at) => {
    const isDark = getComputedStyle(document.documentElement).colorScheme === "dark";
    const layers = parents(at).map((one) => rgba(getComputedStyle(one).backgroundColor));
    return layers.reverse().reduce((below, layer) => over(layer, below), rgba(isDark ? "#121212" : "#ffffff"));
  };
  const light = (color) => {
    const [r, g, b] = color.slice(0, 3).map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (one, other) => {
    const [more, less] = [light(one), light(other)].sort((a, b) => b - a);
    return Math.round(((more + 0.05) / (less + 0.05)) * 100) / 100;
  };
  const opacity = (at) => parents(at).reduce((product, one) => product * Number(getComputedStyle(one).opacity), 1);
  const shown = (at, color, ground) => over([...color.slice(0, 3), color[3] * opacity(at)], ground);
  if (box) {
    const path = getComputedStyle(box.querySelector("path")), ground = over(rgba(path.fill), behind(box.closest("svg").parentElement));
    return Array.from(box.querySelectorAll("text, tspan"), (at) => ratio(rgba(getComputedStyle(at).fill), ground));
  }

  const poor = [];
  const note = (at, words, found, least) => {
    if (found < least) poor.push([words.slice(0, 40), `${at.tagName}.${at.getAttribute("class") || ""}`, found]);
  };
  for (const at of document.querySelectorAll("body *")) {
    const own = Array.from(at.childNodes, (node) => (node.nodeType === Node.TEXT_NODE ? node.data.trim() : "")).join(" ").trim();
    const words = own || (at.matches("input") ? at.value || at.placeholder : "");
    // What is decoration, off, or over a picture (a box of the hover layer) is not judged here.
    if (!words || at.closest("script, style, .hoverlayer, [aria-hidden=true], :disabled, .ag-disabled")) continue;
    if (!at.checkVisibility({ visibilityProperty: true, opacityProperty: true }) || !at.getBoundingClientRect().width) continue;
    const style = getComputedStyle(at), size = parseFloat(style.fontSize), ground = behind(at);
    const isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const color = at.matches("input") && !at.value ? getComputedStyle(at, "::placeholder").color : at instanceof SVGElement ? style.fill : style.color;
    note(at, words, ratio(shown(at, rgba(color), ground), ground), isLarge ? 3 : 4.5);
  }
  for (const at of document.querySelectorAll(".modebar-btn path")) {
    const ground = behind(at.closest(".js-plotly-plot"));
    note(at, "button of a plot", ratio(over(rgba(getComputedStyle(at).fill), ground), ground), 3);
  }
  for (const at of document.querySelectorAll("button, input:not([type=hidden])")) {
    const style = getComputedStyle(at), ground = behind(at.parentElement);
    if (!at.checkVisibility({ visibilityProperty: true, opacityProperty: true }) || at.closest(".ag-root-wrapper, .mantine-Switch-root, :disabled")) continue;
    if (parseFloat(style.borderTopWidth)) note(at, "edge of a control", ratio(shown(at, rgba(style.borderTopColor), ground), ground), 3);
  }
  return poor;
}
