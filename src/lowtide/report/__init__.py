"""Traces and sessions for people: one kind of table for terminal, page and Markdown, one page frame, and charts.

Nothing here prints or computes memory; everything is a function from traces to text, renderables or files.
"""
