import gzip
import json
import subprocess
import sys

import pytest

from cloister.bench.traces import read_trace
from cloister.types.errors import ConfigError


def write(path, text):
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


def test_azure_rows_have_lengths_and_seconds_from_the_first(tmp_path):
    trace = read_trace(write(tmp_path / "azure.csv.gz", AZURE))
    assert [(r.num_input_tokens, r.num_output_tokens) for r in trace.rows] == [(374, 44), (396, 109)]
    assert trace.rows[0].arrival_s == 0
    assert trace.rows[1].arrival_s == pytest.approx(4.314579, abs=1e-5)


def test_mooncake_rows_keep_hash_ids_and_read_milliseconds(tmp_path):
    rows = [
        {"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [0, 7]},
        {"timestamp": 4500, "input_length": 600, "output_length": 6, "hash_ids": [0, 8]},
    ]
    trace = read_trace(write(tmp_path / "m.jsonl.gz", "\n".join(map(json.dumps, rows))))
    assert [r.arrival_s for r in trace.rows] == [0, 1.5]
    assert trace.rows[1].hash_ids == (0, 8)


def test_vidur_lengths_have_no_arrivals(tmp_path):
    text = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69.8\n"
    trace = read_trace(write(tmp_path / "v.csv", text))
    assert not trace.has_arrivals
    assert (trace.rows[0].num_input_tokens, trace.rows[0].num_output_tokens) == (3772, 54)


def test_any_file_with_prompts_and_output_lengths_is_a_trace(tmp_path):
    trace = read_trace(write(tmp_path / "own.jsonl", '{"prompt": "hello", "max_tokens": 3, "arrival_s": 0.5}\n'))
    assert trace.rows[0].prompt == "hello"
    assert trace.rows[0].num_output_tokens == 3


def test_rows_are_sorted_by_arrival(tmp_path):
    trace = read_trace(write(tmp_path / "t.csv", "arrival_s,input_tokens,output_tokens\n9,1,1\n4,2,2\n"))
    assert [(r.arrival_s, r.num_input_tokens) for r in trace.rows] == [(0, 2), (5, 1)]


def test_only_the_first_rows_are_read_when_told(tmp_path):
    assert len(read_trace(write(tmp_path / "azure.csv", AZURE), num_requests=1).rows) == 1


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", "", "has no requests"),
        ("a.csv", "foo,bar\n1,2\n", "lacks lengths"),
        ("a.csv", "input_tokens,output_tokens\n1,2\nsecret,2\n", "line 3"),
        ("a.csv", "input_tokens,output_tokens\n-1,2\n", "at least 0"),
        ("a.csv", "input_tokens,output_tokens,timestamp\n1,2,yesterday\n", "arrival in line 2"),
        ("a.jsonl", "{not json\n", "line 1 of a.jsonl is not JSON"),
        ("a.jsonl", "[1]\n", "not a JSON object"),
        ("a.jsonl", '{"input_length": 1, "output_length": 1, "hash_ids": ["x"]}\n', "hash_ids"),
    ],
)
def test_a_bad_file_is_refused_with_what_to_do(tmp_path, name, text, words):
    with pytest.raises(ConfigError, match=words) as caught:
        read_trace(write(tmp_path / name, text))
    assert "secret" not in caught.value.message


def test_a_file_that_is_not_gzip_is_refused(tmp_path):
    path = tmp_path / "a.csv.gz"
    path.write_text("input_tokens,output_tokens\n1,2\n")
    with pytest.raises(ConfigError, match="gzip"):
        read_trace(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no trace file"):
        read_trace(tmp_path / "none.csv")


def test_a_benchmark_says_a_wrong_name_in_one_line():
    command = [sys.executable, "-m", "benchmarks.scaling", "trace", "nowhere.csv"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "error: no trace file at nowhere.csv; give a CSV or JSONL file, plain or .gz\n"
