"""The text layer of PDF files, taken out by pypdf in a process that lives for one file and has bounds."""
