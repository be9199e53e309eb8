"""plotly.js as the pages need it: of its fifty kinds of traces a page sets up the two that it draws beside lines.

The library is one file of 5 MB; setting up maps, 3-D and the rest takes the browser as long as everything else before the first
paint (0.27 of 0.52 s). The list of what is set up is cut short, in the text that goes to the browser; where a version of the
library has no such list it goes as it is.

The whole library is one function, an arrow that V8 compiles when it is called: 0.25 s in which the page stands still. A function
expression in parentheses is compiled while the text arrives, beside the page (v8.dev/blog/preparser, "PIFEs").
"""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import flask

if TYPE_CHECKING:
    import dash

#: Traces beside scatter, which is always there.
KINDS = ("bar", "heatmap")
#: The address, which names the version: a browser may keep it.
PATH = f"/plotly-{version('plotly')}.js"

#: The list, in the minified text: the name of the library, and calls that each set up a kind.
_LIST = re.compile(rb"([\w$]+)\.register\(\[((?:[\w$]+\(\),){20,}[\w$]+\(\))\]\)")
_NAME_LENGTH = 8
#: The function that is the library, with what it calls at once: how both begin, and how the outer one ends.
_ARROWS, _ARROWS_END = b'() => {\n"use strict";var Plotly=(()=>{', b"return Plotly;\n}));"
_FUNCTIONS, _FUNCTIONS_END = b'(function() {\n"use strict";var Plotly=(function(){', b"return Plotly;\n})));"


def shortened(text: bytes) -> bytes:
    """Return plotly.js with only ``KINDS`` set up; which of the list they are is asked by name, in its order."""
    wanted = ",".join(f'"{kind}"' for kind in KINDS).encode()
    at = text.find(b".register([")
    while at >= 0:
        found = _LIST.search(text, at - _NAME_LENGTH, at + 2000)  # in all of the text the pattern takes 0.3 s
        if found is not None:
            library, calls = found[1], found[2].replace(b"()", b"")
            ask = b"(wanted=>{for(const make of[%b]){if(!wanted.size)break;const kind=make();" % calls
            add = b"if(wanted.delete(kind.name))%b.register([kind])}})(new Set([%b]))" % (library, wanted)
            return text[: found.start()] + ask + add + text[found.end() :]
        at = text.find(b".register([", at + 1)
    return text


def compiled_early(text: bytes) -> bytes:
    """Return plotly.js as a function that the browser compiles before it is called."""
    end = text.rfind(_ARROWS_END)
    if _ARROWS not in text[:2000] or end < 0:
        return text
    return text[:end].replace(_ARROWS, _FUNCTIONS, 1) + _FUNCTIONS_END + text[end + len(_ARROWS_END) :]


@cache
def _script() -> bytes:
    package = find_spec("plotly")  # which is not imported for that: it takes as long as the rest
    assert package is not None and package.origin is not None
    return compiled_early(shortened(Path(package.origin).with_name("package_data").joinpath("plotly.min.js").read_bytes()))


def library_script() -> flask.Response:
    """Return the answer to who asks for ``PATH``."""
    response = flask.Response(_script(), mimetype="text/javascript")
    response.headers["Cache-Control"] = "private, max-age=31536000, immutable"
    return response


def serve_library(app: dash.Dash) -> None:
    """Answer ``PATH``, and tell the pages of it."""
    server: flask.Flask = app.server
    server.add_url_rule(PATH, "library", library_script)
    told = f'<meta name="plot-library" content="{PATH}">'
    app.index_string = app.index_string.replace("{%metas%}", told + "{%metas%}")
