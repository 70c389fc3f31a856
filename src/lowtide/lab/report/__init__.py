"""Records of runs for people: a table, memory against speed, and memory through time, as HTML, markdown and a picture.

Records become rows, rows comparisons, and everything that is drawn or written is a pure function of those.
"""
