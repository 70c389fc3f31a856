"""A StepTrace for people: tables for the terminal, one self-contained HTML page, and figures for papers.

Nothing here prints or computes memory; everything is a function from traces to text, renderables or files.
"""
