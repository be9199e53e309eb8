"""The claims of docs/security.md, each by the name of its test: what a hostile run folder, name or request cannot do."""

from __future__ import annotations

import ast
import csv
import io
import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from fp8debug import Run
from fp8debug.errors import Fp8DebugError, RunError, UsageError
from fp8debug.escaping import field, one_line, plain
from fp8debug.exporters import EXPORTERS
from fp8debug.fallback import Fallback
from fp8debug.reports.github import to_github
from fp8debug.reports.page import to_html
from fp8debug.reports.sarif import to_sarif
from fp8debug.rules import Finding, Findings, Severity
from fp8debug.store import file_checks
from fp8debug.store.dump_files import file_name, open_dump, rank_folder
from fp8debug.store.read.engine import connect
from fp8debug.store.stream import write_part
from fp8debug_cli.console import to_csv
from fp8debug_cli.main import status
from tests.synthetic import Plan, write

ROOT = Path(__file__).parents[1]
HOSTILE = "up\x1b[2J\x1b]0;title\x07\n::set-env name=PATH::/tmp\r##[command]x<script>alert(1)</script>='+\u202e"


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    write(tmp_path / "run", Plan(num_steps=2, every=1, modules=(("up", 128, 256),)))
    return tmp_path / "run"


def hostile_finding() -> Finding:
    return Finding(
        code="F101",
        name="stale-scale-saturation",
        severity=Severity.ERROR,
        module=HOSTILE,
        gemm="fprop",
        tensor="input",
        steps=(0, 1),
        message=f"{HOSTILE} is clipped",
        cure="none",
        also=(HOSTILE,),
    )


class TestTheQueryEngine:
    @pytest.mark.parametrize(
        "query",
        [
            "SELECT * FROM read_csv('/etc/passwd')",
            "SELECT * FROM read_text('/etc/hostname')",
            "SELECT * FROM glob('/etc/*')",
            "SELECT * FROM read_parquet('http://127.0.0.1:1/x.parquet')",
            "SELECT * FROM '/etc/passwd'",
        ],
    )
    def test_a_query_reads_nothing_outside_the_run(self, run_path: Path, query: str) -> None:
        with pytest.raises(UsageError, match="the query failed"):
            Run(run_path).sql(query)

    @pytest.mark.parametrize(
        "query", ["INSTALL httpfs", "LOAD httpfs", "ATTACH '/tmp/x.db'", "COPY (SELECT 1) TO '/tmp/x'", "SET a=1"]
    )
    def test_a_query_is_one_select(self, run_path: Path, query: str) -> None:
        with pytest.raises(UsageError, match="not one SELECT"):
            Run(run_path).sql(query)

    def test_no_extension_is_loaded_or_fetched(self, tmp_path: Path) -> None:
        connection = connect([tmp_path])
        for query in ("INSTALL httpfs", "LOAD httpfs", "LOAD '/tmp/x.duckdb_extension'"):
            with pytest.raises(duckdb.Error):
                connection.execute(query)
        names = "'autoinstall_known_extensions', 'autoload_known_extensions', 'enable_external_access', 'enable_progress_bar'"
        values = connection.execute(f"SELECT value FROM duckdb_settings() WHERE name IN ({names})").fetchall()
        assert {value for (value,) in values} == {"false"} and len(values) == 4
        with pytest.raises(duckdb.Error):
            connection.execute("SET enable_external_access = true")

    @pytest.mark.parametrize("name", ["a'); DROP VIEW raw; --", "*", "run[0-9]?", 'a b"c', "{x,y}", "~", "s3"])
    def test_names_of_folders_are_data(self, tmp_path: Path, name: str) -> None:
        write(tmp_path / name, Plan(num_steps=1, modules=(("up", 128, 256),)))
        run = Run(tmp_path / name)
        assert run.problems == [] and run.table(["sqnr_db"]).num_rows > 0


class TestFilesOfARun:
    def problems(self, path: Path) -> list[str]:
        try:
            return [problem.replace(str(path), "RUN") for problem in Run(path).problems]
        except RunError as error:
            return [str(error).replace(str(path), "RUN")]

    def test_links_do_not_lead_out(self, run_path: Path, tmp_path: Path) -> None:
        other = tmp_path / "other"
        write(other, Plan(num_steps=1, world_size=3, modules=(("up", 128, 256),)))
        (run_path / "rank=00002").symlink_to(other / "rank=00002")
        part = run_path / "rank=00000/steps/part-00000.parquet"
        part.unlink()
        part.symlink_to(other / "rank=00000/steps/part-00000.parquet")
        found = self.problems(run_path)
        assert "RUN/rank=00002 is a link that leads out of the run's folder" in found
        assert "RUN/rank=00000/steps/part-00000.parquet cannot be read: is a link that leads out of the run's folder" in found

    def test_a_link_in_a_circle(self, run_path: Path) -> None:
        (run_path / "rank=00001").symlink_to(run_path / "rank=00001")
        assert len(self.problems(run_path)) == 1

    def test_pipes_devices_and_folders_are_not_opened(self, run_path: Path) -> None:
        os.mkfifo(run_path / "rank=00000/stats/part-00001.parquet")
        os.mkfifo(run_path / "rank=00000/stats-00002.arrows")
        (run_path / "rank=00000/steps/part-00001.parquet").mkdir()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(run_path / "rank=00000/events-00001.arrows"))
            (run_path / "manifest.json").unlink()
            os.mkfifo(run_path / "manifest.json")
            assert sorted(problem.rpartition(": ")[2] for problem in self.problems(run_path)) == [
                "is a FIFO, not a file",
                "is a FIFO, not a file",
                "is a FIFO, not a file",
                "is a folder, not a file",
                "is a socket, not a file",
            ]

    def test_a_large_manifest_is_not_read(self, run_path: Path) -> None:
        with (run_path / "manifest.json").open("r+b") as file:
            file.truncate(2 << 30)  # sparse: no disk is used
        assert self.problems(run_path) == ["RUN/manifest.json cannot be read: is larger than 64 MB"]

    def test_a_large_stream_is_not_read(self, run_path: Path) -> None:
        with (run_path / "rank=00000/stats-00001.arrows").open("wb") as file:
            file.truncate(file_checks.MAX_STREAM_BYTES + 1)
        assert self.problems(run_path) == ["RUN/rank=00000/stats-00001.arrows cannot be read: is larger than 1024 MB"]

    def test_deep_json(self, run_path: Path) -> None:
        for text in ("[" * 200_000, '{"a":' * 500 + "1" + "}" * 500):
            (run_path / "manifest.json").write_text(text)
            assert self.problems(run_path) == ["RUN/manifest.json cannot be read: is nested deeper than 64 levels"]

    def test_a_world_of_a_billion_ranks(self, run_path: Path) -> None:
        own = run_path / "rank=00000/manifest.json"
        own.write_text(json.dumps({**json.loads(own.read_text()), "world_size": 10**18}))
        wanted = f"no rows of rank 1, 2, 3, 4, 5, 6, 7, 8, ... ({10**18 - 1} of {10**18} ranks)"
        assert self.problems(run_path) == [wanted]

    def test_a_footer_that_claims_too_much(self, run_path: Path) -> None:
        part = run_path / "rank=00000/steps/part-00001.parquet"
        pq.write_table(pa.table({"step": pa.array([7] * 4_000_000, pa.int64())}), part, compression="zstd")
        (problem,) = self.problems(run_path)
        assert re.fullmatch(r"RUN/rank=00000/steps/part-00001.parquet cannot be read: claims 4000000 rows in \d+ bytes", problem)

    def test_a_file_that_unpacks_to_too_much(self, run_path: Path) -> None:
        part = run_path / "rank=00000/steps/part-00001.parquet"
        rows = pa.array([bytes(1 << 20)] * 160, pa.binary())
        pq.write_table(
            pa.table({"step": pa.array(range(160), pa.int64()), "blob": rows}), part, compression="zstd", use_dictionary=False
        )
        (problem,) = self.problems(run_path)
        assert re.fullmatch(
            r"RUN/rank=00000/steps/part-00001.parquet cannot be read: claims to hold 16\d{7} bytes in \d{4}", problem
        )

    def test_too_many_columns(self, run_path: Path) -> None:
        part = run_path / "rank=00000/steps/part-00001.parquet"
        names = ["step", *(f"c{at}" for at in range(file_checks.MAX_COLUMNS))]
        pq.write_table(pa.table({name: [1] for name in names}), part)
        assert self.problems(run_path) == ["RUN/rank=00000/steps/part-00001.parquet cannot be read: has 2001 columns"]

    def test_a_column_whose_name_is_no_text(self, run_path: Path) -> None:
        part = run_path / "rank=00000/steps/part-00001.parquet"
        pq.write_table(pa.table({"step": [1], "abcdefgh": [1]}), part, store_schema=False)
        part.write_bytes(part.read_bytes().replace(b"abcdefgh", b"\xaebcdefgh"))
        wanted = "RUN/rank=00000/steps/part-00001.parquet cannot be read: has a column whose name is no text"
        assert self.problems(run_path) == [wanted]

    def test_the_page_states_the_limits(self) -> None:
        page = " ".join((ROOT / "docs/security.md").read_text(encoding="utf-8").split())
        limits = (
            f"JSON {file_checks.MAX_JSON_BYTES >> 20} MB and {file_checks.MAX_DEPTH} levels,"
            f" a stream {file_checks.MAX_STREAM_BYTES >> 30} GB,"
            f" a Parquet footer {file_checks.MAX_FOOTER_BYTES >> 20} MB, {file_checks.MAX_ROWS_PER_BYTE} rows a byte,"
            f" {file_checks.MAX_EXPANSION:,} bytes of content a byte, {file_checks.MAX_GROUP_BYTES >> 30} GB a row group,"
            f" {file_checks.MAX_COLUMNS:,} columns, names and messages {file_checks.MAX_TEXT >> 10} KB"
        )
        assert limits in page

    def test_one_long_name_in_many_rows(self, run_path: Path) -> None:
        part = run_path / "rank=00000/stats/part-00000.parquet"
        table = pq.ParquetFile(part).read()
        names = pa.array(["x" * (5 << 20)] * table.num_rows)
        write_part(table.set_column(table.schema.get_field_index("module"), "module", names), part)
        assert "holds a name or a message longer than 64 KB" in self.problems(run_path)[0]

    def test_a_column_twice(self, run_path: Path) -> None:
        part = run_path / "rank=00000/stats/part-00000.parquet"
        table = pq.ParquetFile(part).read()
        write_part(table.append_column("Step", table["step"]), part)
        assert self.problems(run_path)[0].startswith(
            "RUN/rank=00000/stats/part-00000.parquet is left out: it has the column step twice"
        )

    def test_columns_named_as_sql_names_things(self, run_path: Path) -> None:
        part = run_path / "rank=00000/stats/part-00000.parquet"
        table = pq.ParquetFile(part).read()
        for name in ("select", "ranks", "sqnr_db"):
            about = pa.field(name, pa.int64(), metadata={"unit": "1", "merge": "sum", "doc": "x"})
            table = table.append_column(about, pa.array([1] * table.num_rows, pa.int64()))
        write_part(table, part)
        run = Run(run_path)
        assert run.problems == [] and "select" not in run.columns and run.table(["sqnr_db"]).num_rows == table.num_rows

    def test_a_manifest_of_other_types(self, run_path: Path) -> None:
        manifest = json.loads((run_path / "manifest.json").read_text())
        manifest |= {"filters": [3], "outside": {"a": 1}, "recipe": "blockwise", "argv": 7}
        manifest["modules"][0]["casts"] = {"fprop.input": {"format": "evil"}}
        (run_path / "manifest.json").write_text(json.dumps(manifest))
        assert {problem.removeprefix("RUN/manifest.json: ") for problem in self.problems(run_path)} == {
            "outside is an object, expected a list; it is left out",
            "recipe is text, expected an object; it is left out",
            "argv is a whole number, expected a list; it is left out",
            "filters[] is no object; it is left out",
            "modules[].casts is no casts that we know; it is left out",
        }
        for command in ("coverage", "show"):
            assert status([command, str(run_path)]) == 0

    def test_compressed_and_other_messages_of_a_stream_are_left_out(self, run_path: Path) -> None:
        table = pq.ParquetFile(run_path / "rank=00000/steps/part-00000.parquet").read()
        path = run_path / "rank=00000/steps-00001.arrows"
        with (
            path.open("wb") as file,
            pa.ipc.new_stream(file, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as out,
        ):
            out.write_table(table)
        (problem,) = self.problems(run_path)
        assert "is damaged at byte" in problem and "a compressed batch" in problem

    def test_no_name_leads_a_dump_out_of_its_folder(self, tmp_path: Path) -> None:
        folder = rank_folder(tmp_path, 0, 0)
        for module in ("../../../../etc/x", "/etc/x", "..", "a/../../b", "a\x00b", "~root", "x" * 9000, HOSTILE):
            path = folder / file_name(module, "fprop", "input")
            assert path.parent == folder and path.resolve().is_relative_to(folder.resolve()) and len(path.name) < 256

    def test_a_dump_that_is_a_pipe_is_not_opened(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "x.safetensors")
        with pytest.raises(RunError, match="is a FIFO, not a file"):
            open_dump(tmp_path / "x.safetensors")


class TestNamesInOutput:
    def test_no_terminal_sequence_of_a_run_is_printed(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        write(
            tmp_path / "run",
            Plan(num_steps=2, every=1, modules=((HOSTILE, 128, 256),), manifest={"recipe": {"name": "\x1b[31m"}}),
        )
        for command in (["show"], ["show", "--format", "csv"], ["coverage"], ["triage", "--select", "F113"], ["calibrate"]):
            assert status([command[0], str(tmp_path / "run"), *command[1:]]) in (0, 1)
            out, err = capsys.readouterr()
            assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", out + err), command
            assert not re.search(r"(?m)^\s*(::|##\[)", out + err), command
        assert status(["show", str(tmp_path / "run\x1b[2J")]) == 3
        assert "\x1b" not in capsys.readouterr().err

    def test_text_made_plain(self) -> None:
        assert plain("a\x1b[2Jb\u202ec\td\n") == "a\\x1b[2Jb\\u202ec\td\n"
        assert plain("::error::x ##[group]y") == "\\x3a:error\\x3a:x \\x23#[group]y"
        assert one_line("a\nb\tc") == "a\\nb\\tc" and len(one_line("x" * 10**6)) < 3000
        assert plain("blocks.0.up: 31.5 dB <= 2x, 50 %") == "blocks.0.up: 31.5 dB <= 2x, 50 %"

    def test_no_cell_of_a_csv_is_a_formula(self) -> None:
        formulas = ["=cmd|' /C calc'!A0", "+1+1", "@SUM(1)", "-x", "\tx", "::add-mask::x"]
        text = to_csv(["module"], [{"module": formula} for formula in formulas])
        assert all(row[0].startswith("'") for row in list(csv.reader(io.StringIO(text)))[1:])
        assert [field(value) for value in ("blocks.0", "-1.5", -1.5, None, "a-b")] == ["blocks.0", "-1.5", -1.5, None, "a-b"]
        found = Findings([Finding(**{**vars(hostile_finding()), "module": "=1+1"})])
        assert next(csv.DictReader(io.StringIO(found.to_csv())))["module"] == "'=1+1"

    def test_github_annotations_are_one_command_each(self) -> None:
        lines = to_github(Findings([hostile_finding()])).split("\n")
        assert len(lines) == 2 and lines[1] == "" and lines[0].startswith("::error title=F101 ")
        title = lines[0].removeprefix("::error title=").partition("::")[0]
        assert ":" not in title and "," not in title and "\r" not in lines[0]

    def test_sarif_is_json_without_control_characters(self) -> None:
        text = to_sarif(Findings([hostile_finding()]))
        assert json.loads(text)["runs"][0]["results"][0]["ruleId"] == "F101"
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)

    def test_the_html_report_escapes_names_and_runs_no_script(self, run_path: Path) -> None:
        text = to_html(Run(run_path), Findings([hostile_finding()], run=HOSTILE))
        assert "<script" not in text and "&lt;script&gt;" in text
        assert "default-src 'none'" in text

    @pytest.mark.parametrize("name", sorted(EXPORTERS.names()))
    def test_no_name_breaks_out_of_an_exported_file(self, run_path: Path, name: str) -> None:
        exporter = EXPORTERS.get(name)
        fallbacks = [Fallback(module=HOSTILE, gemms=("fprop", "dgrad", "wgrad"), cast=None, reasons=("F101",))]
        try:
            files = exporter.files(Run(run_path), fallbacks)
        except Fp8DebugError:
            return  # it says that it cannot write such a name
        for part, text in files.items():
            assert "/" not in part and ".." not in part
            assert "\x1b" not in text and "\n::set-env" not in text
            if exporter.suffix == ".yaml":
                assert isinstance(yaml.safe_load(text), dict)
            elif exporter.suffix == ".json":
                json.loads(text)
            elif exporter.suffix == ".py":
                ast.parse(text)


class TestTheDashboard:
    def test_tokens_are_compared_in_constant_time(self) -> None:
        text = (ROOT / "dashboard/web/server.py").read_text(encoding="utf-8")
        assert "hmac.compare_digest" in text and not re.search(r"==\s*token|token\s*==", text)

    @pytest.mark.parametrize(("host", "code"), [("127.0.0.1:8050", 200), ("evil.example", 403)])
    def test_without_a_token_only_this_machine_is_answered(self, run_path: Path, host: str, code: int) -> None:
        assert self.client(run_path, None).get("/", headers={"Host": host}).status_code == code

    def test_with_a_token_nothing_is_shown_before_it(self, run_path: Path) -> None:
        client = self.client(run_path, "t" * 24)
        for path in ("/", "/_dash-layout", "/assets/fp8debug.js", "/?token=wrong"):
            assert client.get(path).status_code == 403, path
        answer = client.get("/?token=" + "t" * 24)
        assert (
            answer.status_code == 303 and "HttpOnly" in answer.headers["Set-Cookie"] and "token" not in answer.headers["Location"]
        )

    def test_no_address_of_it_writes(self, run_path: Path) -> None:
        rules = self.client(run_path, None).application.url_map.iter_rules()
        told = {rule.rule for rule in rules if not (rule.methods or set()) <= {"GET", "HEAD", "OPTIONS"}}
        assert told == {"/_dash-update-component"}  # which asks for a page's contents

    def test_a_run_is_opened_by_its_name_and_never_by_a_path(self, run_path: Path) -> None:
        from fp8debug_dashboard.web.source import ServedFolder

        source = ServedFolder(run_path.parent)
        for name in ("../run", "/etc", "run/../run", ".", "", "run\x00"):
            with pytest.raises(Fp8DebugError, match="unknown run"):
                source.folder(name)

    @staticmethod
    def client(path: Path, token: str | None) -> Any:
        from fp8debug_dashboard.web.app import make_app
        from fp8debug_dashboard.web.server import guard

        app = make_app(path)
        guard(app, token)
        return app.server.test_client()
