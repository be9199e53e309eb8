"""The style sheet of report pages and of figures in a notebook: light and dark by the reader's own setting, fit for print."""

from __future__ import annotations

_LIGHT = """--ink: #1b1f24; --muted: #5b6470; --page: #f6f7f9; --panel: #ffffff; --line: #d8dde3;
  --accent: #1f5fbf; --error: #b3261e; --warning: #8a5a00; --info: #1f5fbf; --ok: #1a7f37; --shade: #b3261e1f;
  --l0: #bfe3cf; --l1: #f3e390; --l2: #e69f00; --l3: #c62f1d; --l4: #7b1fa2; --l5: #e6e9ee;
  --v0: #d3e5f5; --v1: #93c1e8; --v2: #3f8fcb; --v3: #0b4a80;"""
_DARK = """--ink: #e6e9ee; --muted: #a0a9b5; --page: #14171b; --panel: #1d2127;
  --line: #363d47; --accent: #7fb0ff; --error: #ff8a80; --warning: #f2b84b; --info: #7fb0ff;
  --ok: #6fd08c; --shade: #ff8a8026; --l0: #1f4d38; --l1: #8d7d25; --l2: #e69f00; --l3: #ff6f5e; --l4: #ce93ff; --l5: #2b313a;
  --v0: #1d3347; --v1: #2c5f8c; --v2: #4a97d6; --v3: #b5dbff;"""

#: What a figure in a notebook and a page share.
_PARTS = """
h2 { font-size: 18px; margin: 0 0 8px; }
h3 { font-size: 16px; margin: 0 0 6px; overflow-wrap: anywhere; } h4 { margin: 12px 0 2px; font-size: 14px; }
p { margin: 6px 0; } ul, ol { margin: 6px 0; padding-left: 22px; } li { overflow-wrap: anywhere; }
.muted { color: var(--muted); font-size: 13px; } .lead { font-size: 16px; overflow-wrap: anywhere; }
.badge { border: 1px solid currentColor; border-radius: 6px; padding: 1px 8px; font-size: 14px; font-weight: 600;
  white-space: nowrap; }
.badge.error { color: var(--error); } .badge.warning { color: var(--warning); } .badge.info { color: var(--info); }
.badge.ok { color: var(--ok); }
code { font: 13px ui-monospace, monospace; overflow-wrap: anywhere; }
details { margin-top: 10px; } summary { cursor: pointer; color: var(--accent); }
svg { width: 100%; height: auto; display: block; font: 11px system-ui, sans-serif; }
svg .name { fill: var(--ink); font-size: 12px; font-weight: 600; } svg .tick { fill: var(--muted); }
svg .strong { fill: var(--error); font-weight: 600; } svg .end { text-anchor: end; }
svg .grid { stroke: var(--line); } svg .limit { stroke: var(--warning); stroke-dasharray: 5 4; }
svg .mark { stroke: var(--error); stroke-dasharray: 2 3; } svg .span { fill: var(--shade); }
svg .lost { fill: #8e24aa; fill-opacity: 0.18; }
svg .line { fill: none; stroke: var(--accent); stroke-width: 1.5; } svg .dot { fill: var(--accent); }
svg .beside { stroke: var(--muted); stroke-dasharray: 6 4; }
.narrow { display: none; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(380px, 100%), 1fr)); gap: 12px; margin: 12px 0; }
.scroll { overflow-x: auto; } .scroll td:not(.num) { min-width: 90px; }
table { border-collapse: collapse; font-size: 13px; width: 100%; table-layout: auto; }
th, td { text-align: left; padding: 3px 10px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: anywhere; }
th { color: var(--muted); font-weight: 600; overflow-wrap: normal; } .num { text-align: right; white-space: nowrap; }
.hm { font-size: 13px; }
.hm-row { display: grid; grid-template-columns: minmax(90px, 2fr) minmax(160px, 5fr) minmax(110px, 3fr); gap: 0 12px;
  align-items: center; padding: 2px 0; color: var(--ink); }
.hm-name { font: 12px/1.3 ui-monospace, monospace; overflow-wrap: anywhere; }
.hm-words { color: var(--muted); font-size: 12px; line-height: 1.3; overflow-wrap: anywhere; } .hm-words b { color: var(--ink); }
.hm-ends { display: flex; justify-content: space-between; color: var(--muted); font-size: 12px; }
svg.hm-cells { height: 14px; background: var(--l5); shape-rendering: crispEdges; }
.hm details { margin: 0; } .hm summary { list-style-position: outside; margin-left: 14px; }
.hm details[open] { border-left: 2px solid var(--line); margin: 4px 0; }
.hm details > .hm-row, .hm > .hm-row { margin-left: 14px; }
.hm-legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 12px; color: var(--muted); }
.hm-legend i { display: inline-block; width: 12px; height: 12px; margin-right: 5px; vertical-align: -1px;
  border: 1px solid var(--line); }
.l0 { fill: var(--l0); background: var(--l0); } .l1 { fill: var(--l1); background: var(--l1); }
.l2 { fill: var(--l2); background: var(--l2); } .l3 { fill: var(--l3); background: var(--l3); }
.l4 { fill: var(--l4); background: var(--l4); } .l5 { fill: var(--l5); background: var(--l5); }
.v0 { fill: var(--v0); background: var(--v0); } .v1 { fill: var(--v1); background: var(--v1); }
.v2 { fill: var(--v2); background: var(--v2); } .v3 { fill: var(--v3); background: var(--v3); }
@media (max-width: 640px) { .wide { display: none; } .narrow { display: block; }
  .hm-row { grid-template-columns: 1fr; padding: 5px 0; }
  .scroll table { min-width: 620px; } }
"""

CSS = f"""
:root {{ color-scheme: light dark; {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }}
main {{ max-width: 1100px; margin: 0 auto; padding: 24px 16px 48px; }}
h1 {{ font-size: 24px; margin: 0; overflow-wrap: anywhere; }}
section {{ margin-top: 20px; }}
.panel {{ background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 16px; }}
article.panel {{ margin-top: 14px; border-left-width: 4px; }}
article.error {{ border-left-color: var(--error); }} article.warning {{ border-left-color: var(--warning); }}
article.info {{ border-left-color: var(--info); }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: 2px 12px; margin: 8px 0; }}
dt {{ color: var(--muted); max-width: 240px; overflow-wrap: anywhere; }} dd {{ margin: 0; overflow-wrap: anywhere; }}
.classes .here {{ border-left: 3px solid var(--accent); padding-left: 6px; }}
footer {{ margin-top: 20px; }}
{_PARTS}
@media print {{ body {{ background: none; }} .panel {{ break-inside: avoid; }} }}
"""

#: For one figure in a notebook: nothing outside its element changes. Its ground is its own: the notebook's theme is not
#: known. The class stands twice, to weigh more than the notebook's own rules for tables.
SCOPED_CSS = f"""
.fp8debug.fp8debug {{ color-scheme: light dark; {_LIGHT} background: var(--panel); color: var(--ink); padding: 12px;
  border-radius: 8px; border: 1px solid var(--line); font: 14px/1.5 system-ui, sans-serif; text-align: left; max-width: 1100px;
  {_PARTS} }}
@media (prefers-color-scheme: dark) {{ .fp8debug.fp8debug {{ {_DARK} }} }}
"""
