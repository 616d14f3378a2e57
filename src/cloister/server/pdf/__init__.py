"""Extracts the text layer of PDF files with pypdf, in a confined process for each file."""
