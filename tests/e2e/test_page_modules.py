"""The page's own modules, one by one, in the browser that runs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Browser
from tests.server.running_server import ScriptedEngine, says, serving_script, write_model


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path: Path = write_model(tmp_path_factory.mktemp("page_model"))
    with serving_script(path, ScriptedEngine(says("x"))) as server:
        yield server.url


@pytest.fixture
def page(browser: Browser, url: str) -> Browser:
    if not browser.driver.current_url.startswith(url):
        browser.open(url)
    return browser


def outline(blocks: list[dict[str, Any]]) -> str:
    """A tree of Markdown as one line, for comparison: kind(inside)."""
    return " ".join(sketch(block) for block in blocks)


def sketch(node: dict[str, Any]) -> str:
    match node["kind"]:
        case "text":
            return repr(node["text"])
        case "heading":
            return f"h{node['level']}({outline(node['spans'])})"
        case "math":
            return f"math({node['text']!r})"
        case "code":
            return f"code({node.get('language') or ''}:{node['text']!r})"
        case "link":
            return f"link({node['url']} {outline(node['spans'])})"
        case "list":
            return f"{'ol' if node['ordered'] else 'ul'}({' | '.join(outline(item) for item in node['items'])})"
        case "table":
            rows = [node["head"], *node["rows"]]
            return f"table({' / '.join(' | '.join(outline(cell) for cell in row) for row in rows)})"
        case kind:
            return f"{kind}({outline(node.get('spans') or node.get('blocks') or [])})"


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("plain", "paragraph('plain')"),
        ("one\ntwo", "paragraph('one\\ntwo')"),
        ("one  \ntwo", "paragraph('one' break() 'two')"),
        ("one\n\ntwo", "paragraph('one') paragraph('two')"),
        ("# A *b* #", "h1('A ' em('b'))"),
        ("####### seven", "paragraph('####### seven')"),
        ("#hash", "paragraph('#hash')"),
        ("**a *b* c**", "paragraph(strong('a ' em('b') ' c'))"),
        ("***a***", "paragraph(strong(em('a')))"),
        ("2 * 3 * 4 and a_b_c and __init__.py", "paragraph('2 * 3 * 4 and a_b_c and ' strong('init') '.py')"),
        ("**open", "paragraph('**open')"),
        (r"\*not\* \[a](b)", "paragraph('*not* [a](b)')"),
        ("`a*b*` ``c`d``", "paragraph(code(:'a*b*') ' ' code(:'c`d'))"),
        ("~~gone~~", "paragraph(del('gone'))"),
        ("- a\n- b\n  - c\n\n  d", "ul(paragraph('a') | paragraph('b') ul(paragraph('c')) paragraph('d'))"),
        ("3. a\n4. b", "ol(paragraph('a') | paragraph('b'))"),
        ("- a\n\n- b", "ul(paragraph('a') | paragraph('b'))"),
        ("- a\nlazy\n\nnext", "ul(paragraph('a\\nlazy')) paragraph('next')"),
        ("text\n- a", "paragraph('text') ul(paragraph('a'))"),
        ("- ```\n  x\n    y\n  ```", "ul(code(:'x\\n  y'))"),
        ("> a\n> > b", "quote(paragraph('a') quote(paragraph('b')))"),
        ("a | b\n--|--\n1 | `x|y`", "table('a' | 'b' / '1' | '`x')"),
        ("| a |\n|:-:|\n| 1 \\| 2 |", "table('a' / '1 | 2')"),
        ("a | b\nno table", "paragraph('a | b\\nno table')"),
        ("---", "rule()"),
        ("```py\n# x\n\ny\n```\nz", "code(py:'# x\\n\\ny') paragraph('z')"),
        ("````\n```\n````", "code(:'```')"),
        ("```\nopen", "code(:'open')"),
        ("[a](https://b.c/d_(e))", "paragraph(link(https://b.c/d_(e) 'a'))"),
        ("[**a**](http://b.c)", "paragraph(link(http://b.c/ strong('a')))"),
        ("(https://b.c/d).", "paragraph('(' link(https://b.c/d 'https://b.c/d') ').')"),
        ("<https://b.c> <b>", "paragraph(link(https://b.c/ 'https://b.c') ' <b>')"),
        ("![x](https://b.c/i.png)", "paragraph(link(https://b.c/i.png 'image: x'))"),
        ("[a](javascript:alert(1))", "paragraph('[a](javascript:alert(1))')"),
        ("[a](/local) [b](#x) [c](data:x)", "paragraph('[a](/local) [b](#x) [c](data:x)')"),
        ("[a][b] [ ] (c)", "paragraph('[a][b] [ ] (c)')"),
        ("so $x^2$ and \\(y\\)", "paragraph('so ' math('x^2') ' and ' math('y'))"),
        ("$5 or $6, US$7, 8$ and $ 9 $", "paragraph('$5 or $6, US$7, 8$ and $ 9 $')"),
        ("a\n$$\nx\n$$\nb", "paragraph('a') math('x') paragraph('b')"),
        ("\\[ x \\]\n\n$$y$$.", "math('x') math('y')"),
        ("$$open\n\n`$x$`", "paragraph('$$open') paragraph(code(:'$x$'))"),
        ("", ""),
    ],
)
def test_markdown_becomes_a_tree(page, text, tree):
    assert outline(page.call("markdown.js", "m.parseMarkdown(a[0])", text)) == tree


@pytest.mark.parametrize(
    "piece",
    [
        "[",
        "[a](",
        "![",
        "*a **** ",
        "` `` ",
        "**a*",
        "_a",
        "~~ ",
        "<a ",
        "http://",
        "> ",
        "- ",
        "| ",
        "#",
        " ",
        "\n",
        "](",
        "1. ",
        "```\n",
        "$",
        "$a ",
        "$$\n",
        "\\[\n",
        "\\(",
    ],
)
def test_no_text_makes_markdown_slow(page, piece):
    script = "((start) => (m.parseMarkdown(a[0].repeat(20000)), performance.now() - start))(performance.now())"
    assert page.call("markdown.js", script, piece) < 5000


def test_a_text_that_grows_is_always_drawn_whole(page):
    blocks = (
        "# T\r\n",
        "some *text*\nmore\n- a\n\n- b\n\n  c\n\n",
        "```py\nx = 1\n\n```\n> q\n",
        "| a |\n|---|\n| 1 |\n",
        "---\n3. x\n",
        "$a$ and\n$$\nb^2\n$$\n\\[ c \\]\n",
        "end",
    )
    text = "\n".join(blocks)
    script = """((view) => [...Array(a[0].length + 1).keys()].every((n) => {
        view.show(a[0].slice(0, n));
        const fresh = new m.MarkdownView();
        fresh.show(a[0].slice(0, n));
        return view.element.isEqualNode(fresh.element);
    }))(new m.MarkdownView())"""
    assert page.call("render.js", script, text)


def test_a_text_that_changed_is_drawn_anew(page):
    script = """((view) => a[0].map((text) => (view.show(text), view.element.textContent)))(new m.MarkdownView())"""
    texts = ["one\n\ntwo", "one\n\ntwo\n\nthree", "one", "", "other"]
    assert page.call("render.js", script, texts) == ["onetwo", "onetwothree", "one", "", "other"]


def test_code_keeps_every_character(page):
    code = 'def f(x): # c\n  return """a\nb""" + \'it\\\'s\' + 0x1F\n<b>\tü\u2028end'
    for language in ("python", "py", "js", "c++", "sql", "json", "sh", "unknown", "constructor", ""):
        tokens = page.call("highlight.js", "m.highlight(a[0], a[1])", code, language)
        assert "".join(part for _, part in tokens) == code


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("f_i'^2", "msubsup(f i mrow(′ 2))"),
        ("x^2^3", None),
        ("x_i^2", "msubsup(x i 2)"),
        (r"\frac12 + \sqrt[3]{x}", "mfrac(1 2) + mroot(x 3)"),
        (r"\sum_{i=1}^n i", "munderover(∑ mrow(i = 1) n) i"),
        (r"\left(\hat{y}\right)", "mrow(( mover(y ^) ))"),
        (r"\mathbb{R}^n \to \mathcal L", "msup(ℝ n) → ℒ"),
        (r"\text{if } x \ge 0", "if  x ≥ 0"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "mrow(( mtable(mtr(mtd(1) mtd(2)) mtr(mtd(3) mtd(4))) ))"),
        (r"a&=b\\&=c", "mtable(mtr(mtd(a) mtd(mrow(= b))) mtr(mtd(mrow) mtd(mrow(= c))))"),
        (r"\begin{cases}1\\0\end{cases}", "mrow({ mtable(mtr(mtd(1)) mtr(mtd(0))))"),
        (r"\operatorname{rank}(A)", "rank ( A )"),
        (r"f'", "msup(f ′)"),
        (r"\href{javascript:x}{y}", None),
        (r"\constructor", None),
        (r"\frac{1}", None),
        ("a_", None),
        ("}", None),
        ("{" * 100, None),
        (r"\begin{__proto__}x\end{__proto__}", None),
    ],
)
def test_formulas_become_mathml_or_stay_as_they_are(page, text, tree):
    script = """((show) => { const math = m.parseTex(a[0], true); return math && math.children.map(show).join(" "); })
        (function show({ name, text, children }) {
            return children.length ? `${name}(${children.map(show).join(" ")})` : text || name; })"""
    assert page.call("tex.js", script, text) == tree


@pytest.mark.parametrize(
    "piece", ["{", "\\frac", "x^", "\\left(", "\\begin{cases}", "\\sqrt[", "\\hat", "\\text{", "&", "\\\\"]
)
def test_no_formula_is_slow(page, piece):
    script = "((start) => (m.parseTex(a[0].repeat(4000 / a[0].length), true), performance.now() - start))(performance.now())"
    assert page.call("tex.js", script, piece) < 500


def test_events_are_read_however_the_stream_is_cut(page):
    stream = 'data: {"a": 1}\n\n: comment\ndata:two\r\ndata: lines\r\n\r\nevent: x\ndata: [DONE]\n\n'
    script = """[1, 2, 3, 7, 1000].map((n) => {
        const parser = new m.EventParser();
        return (a[0].match(new RegExp(`[^]{1,${n}}`, 'g')) ?? []).flatMap((piece) => parser.push(piece));
    })"""
    for events in page.call("sse.js", script, stream):
        assert events == ['{"a": 1}', "two\nlines", "[DONE]"]


def test_an_answer_is_put_together_from_its_pieces(page):
    chunks = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"reasoning_content": "hm", "reasoning": "hm"}}]},
        {"choices": [{"delta": {"content": "a"}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "f", "arguments": ""}}]}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"x"'}}]}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 1, "id": "c2", "function": {"name": "g", "arguments": "{}"}}]}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]}}]},
        {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]},
        {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 11, "prompt_tokens_details": {"cached_tokens": 4}}},
    ]
    script = """((turn) => { a[0].forEach((chunk, i) => m.takeChunk(turn, chunk, 1000 + 100 * i));
        return [turn, m.describeFigures(turn.figures)]; })
        ({ content: "", reasoning: "", toolCalls: [], exchange: { response: [] }, figures: m.newFigures(950) })"""
    turn, figures = page.call("answer.js", script, chunks)
    assert (turn["content"], turn["reasoning"]) == ("a", "hm")
    assert [(call["id"], call["function"]) for call in turn["toolCalls"]] == [
        ("c1", {"name": "f", "arguments": '{"x": 1}'}),
        ("c2", {"name": "g", "arguments": "{}"}),
    ]
    assert [text for text, _ in figures] == ["11 tokens", "20.0 tokens/s", "150 ms to first token", "7 prompt tokens, 4 cached"]


def test_speed_counts_tokens_after_the_first_where_that_can_be_timed(page):
    def figures(count: int, sent: int, first: int, last: int) -> list[list[str]]:
        usage = {"prompt_tokens": 5, "completion_tokens": count}
        given = {"sentMs": sent, "firstMs": first, "lastMs": last, "usage": usage}
        return page.call("answer.js", "m.describeFigures(a[0])", given)

    def texts(*given: int) -> list[str]:
        return [text for text, _ in figures(*given)]

    assert texts(101, 0, 2000, 4000) == ["101 tokens", "50.0 tokens/s", "2.0 s to first token", "5 prompt tokens"]
    assert texts(10, 0, 40, 50) == ["10 tokens", "200 tokens/s", "40 ms to first token", "5 prompt tokens"]
    assert texts(1, 0, 500, 500) == ["1 token", "2.0 tokens/s", "answered in 500 ms", "5 prompt tokens"]
    assert "after the first token" in figures(101, 0, 2000, 4000)[1][1]
    assert "from the question" in figures(10, 0, 40, 50)[1][1]


METRICS = """# HELP x y
# TYPE cloister_a counter
cloister_a_total{reason="a \\"b\\"",x="1"} 3.0
cloister_a_total{reason="c"} 4
cloister_ttft_seconds_bucket{le="0.1"} %d
cloister_ttft_seconds_bucket{le="0.2"} %d
cloister_ttft_seconds_bucket{le="+Inf"} %d
cloister_gauge 1e-05 1700000000
"""


def test_metrics_are_read_as_prometheus_writes_them(page):
    samples = dict(page.call("metrics.js", "[...m.parseMetrics(a[0])]", METRICS % (1, 2, 3)))
    assert samples["cloister_a_total"][0] == {"labels": {"reason": 'a \\"b\\"', "x": "1"}, "value": 3}
    assert samples["cloister_gauge"][0]["value"] == 1e-05
    assert page.call("metrics.js", "m.valueOf(m.parseMetrics(a[0]), 'cloister_a_total')", METRICS % (1, 2, 3)) == 7
    assert page.call("metrics.js", "m.valueOf(m.parseMetrics(a[0]), 'missing')", METRICS % (1, 2, 3)) is None


def test_quantiles_are_those_of_what_came_between_two_readings(page):
    script = """((h) => h && [0.25, 0.5, 0.9, 1].map((q) => m.quantileOf(h, q)))
        (m.observedBetween(m.parseMetrics(a[0]), m.parseMetrics(a[1]), 'cloister_ttft_seconds'))"""
    between = page.call("metrics.js", script, METRICS % (100, 100, 100), METRICS % (102, 104, 104))
    assert between == pytest.approx([0.05, 0.1, 0.18, 0.2])
    beyond = page.call("metrics.js", script, METRICS % (0, 0, 0), METRICS % (0, 0, 5))
    assert beyond == pytest.approx([0.2] * 4)
    assert page.call("metrics.js", script, METRICS % (1, 1, 1), METRICS % (1, 1, 1)) is None


def test_a_server_that_was_started_again_counts_from_nothing(page):
    script = "m.riseOf(m.parseMetrics(a[0]), m.parseMetrics(a[1]), 'n')"
    assert page.call("metrics.js", script, "n 10\n", "n 12\n") == 2
    assert page.call("metrics.js", script, "n 10\n", "n 3\n") == 3
    assert page.call("metrics.js", script, "", "n 3\n") == 3
    assert page.call("metrics.js", script, "n 3\n", "") is None
    assert page.call("metrics.js", script, 'n{p="0"} 90\nn{p="1"} 9\n', 'n{p="0"} 1\nn{p="1"} 10\n') == 2


def test_settings_say_what_is_wrong_and_leave_out_what_is_empty(page):
    assert page.call("settings.js", "m.fieldsOf(m.DEFAULTS)") == {}
    changed = {
        "temperature": "0,5",
        "max_tokens": "1.5",
        "seed": " 7 ",
        "tools": '{"name": "f"}',
        "tool_choice": "required",
        "format": "json_schema",
        "schema": '{"type": "object"}',
        "more": '{"min_p": 0.1}',
    }
    assert page.call("settings.js", "m.fieldsOf({ ...m.DEFAULTS, ...a[0] })", changed) == {
        "seed": 7,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "required",
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}},
        "min_p": 0.1,
    }
    wrong = {"temperature": "0,5", "max_tokens": "1.5", "top_p": "2", "tools": "[1]", "more": "[]", "schema": "{"}
    for name, value in wrong.items():
        assert page.call("settings.js", "m.faultOf(a[0], a[1])", name, value)


def test_a_choice_that_is_undone_keeps_what_was_said_since(page):
    script = """((one) => { const [first, second] = [m.newTurn("assistant"), m.newTurn("assistant")];
        first.variants.push(second); one.turns.push(m.newTurn("user"), first);
        const undo = m.choose(one, first, second);
        const chosen = one.turns[1] === second && first.variants.length === 0;
        one.turns.push(m.newTurn("user"));
        undo();
        return [chosen, one.turns[1] === first, first.variants.length, one.turns.length]; })(m.newConversation())"""
    assert page.call("conversation.js", script) == [True, True, 1, 3]


def test_an_answer_that_never_came_is_not_said_again(page):
    conversation = {
        "turns": [
            {"id": "1", "role": "user", "content": "a", "files": [], "toolCalls": []},
            {"id": "2", "role": "assistant", "content": "", "files": [], "toolCalls": [], "state": "failed"},
            {"id": "3", "role": "user", "content": "b", "files": [], "toolCalls": []},
        ]
    }
    messages = page.call("conversation.js", "m.messagesOf(a[0].turns, ' ')", conversation)
    assert messages == [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]


@pytest.mark.parametrize(
    ("error", "title", "helps"),
    [
        ({"status": 0}, "The server cannot be reached", "retry"),
        ({"status": 0, "code": "cut_off"}, "The answer was cut off", "retry"),
        ({"status": 401}, "This server asks for an API key", "key"),
        ({"status": 403}, "The privacy profile does not allow this", None),
        ({"status": 413}, "The conversation is too large to send", None),
        ({"status": 429, "retryAfterS": 3}, "Too much at once", "retry"),
        ({"status": 500}, "The server made a mistake", "retry"),
        ({"status": 503}, "The server is not ready", "retry"),
        ({"status": 504}, "The answer took too long", "retry"),
        ({"status": 400, "code": "context_length_exceeded"}, "The conversation is too long for the model", None),
        ({"status": 400}, "The server cannot take this request", None),
    ],
)
def test_every_error_has_plain_words(page, error, title, helps):
    explained = page.call("errors.js", "m.explain(a[0])", error)
    assert (explained["title"], explained["helps"]) == (title, helps)
    assert explained["detail"]
    assert explained["waitS"] == error.get("retryAfterS", 0)


def test_a_person_without_a_key_is_not_told_about_headers(page):
    said = "this server asks for an API key: send it as 'Authorization: Bearer KEY'"
    assert "Bearer" not in page.call("errors.js", "m.explain(a[0]).detail", {"status": 401, "message": said})
    unknown = "this API key is not known"
    assert page.call("errors.js", "m.explain(a[0]).detail", {"status": 401, "message": unknown}) == unknown


def test_what_was_exported_can_be_opened_again(page):
    script = """((made) => { const back = m.importJson(m.exportJson(made, { system: "" }, new Date(0)));
        return [made, back].map((one) => one.turns.map(({ id, exchange, ...rest }) => rest)); })
        ({ ...m.newConversation(), turns: [
            m.newTurn("user", { content: "a" }),
            m.newTurn("assistant", { toolCalls: [{ id: "c", type: "function", function: { name: "f", arguments: "{}" } }] }),
            m.newTurn("tool", { content: "b", toolCallId: "c" }),
            m.newTurn("assistant", { content: "**d**", reasoning: "hm" })] })"""
    made, back = page.call("conversation.js", script)
    assert back == made


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        '{"format": "cloister-conversation", "version": 2, "turns": []}',
        '{"format": "cloister-conversation", "version": 1}',
        '{"format": "cloister-conversation", "version": 1, "turns": [{"role": "system", "content": "x"}]}',
        '{"format": "cloister-conversation", "version": 1, "turns": [{"role": "user", "content": 1}]}',
        '{"format": "cloister-conversation", "version": 1, "turns": [{"role": "user", "content": "a", "toolCalls": [{}]}]}',
    ],
)
def test_a_file_that_is_no_conversation_is_not_opened(page, text):
    assert page.call("conversation.js", "m.importJson(a[0])", text) is None
