"""The process that reads one PDF file: standard input to standard output, no files, no words on standard error."""

from __future__ import annotations

import io
import logging
import os
import resource
import sys

import msgspec

from cloister.server.pdf.limits import PdfAnswer, PdfLimits


def main() -> None:
    """Reads a file under the limits of the first argument, as JSON, and writes a `PdfAnswer`."""
    limits = msgspec.json.decode(sys.argv[1], type=PdfLimits)
    logging.disable()  # what pypdf warns of may be content
    os.nice(10)  # answers go first
    for kind, bound in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_AS, limits.memory_bytes),
    ):
        resource.setrlimit(kind, (bound, bound))
    answer = read(sys.stdin.buffer.read(), limits)
    sys.stdout.buffer.write(msgspec.json.encode(answer))


def read(data: bytes, limits: PdfLimits) -> PdfAnswer:
    """Returns the text layer of a file, page by page with an empty line between."""
    import pypdf  # of an extra: a sealed node imports every module of the package and has no PDF reader

    try:
        document = pypdf.PdfReader(io.BytesIO(data))
        if document.is_encrypted and not document.decrypt(""):
            return PdfAnswer(fault="encrypted")
        num_pages = len(document.pages)
        if num_pages > limits.num_pages:
            return PdfAnswer(fault="pages")
        texts: list[str] = []
        for page in document.pages:
            texts.append(page.extract_text().strip())
            if sum(map(len, texts)) > limits.num_chars:
                return PdfAnswer(fault="long")
    except MemoryError:
        return PdfAnswer(fault="costly")
    except Exception:  # of many kinds; what it says may be content
        return PdfAnswer(fault="damaged")
    text = "\n\n".join(filter(None, texts)).replace("\0", "").encode(errors="replace").decode()
    return PdfAnswer(num_pages, text, "" if text.strip() else "no_text")


if __name__ == "__main__":
    main()
