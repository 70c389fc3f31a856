"""Planning: what each technique would really save, and (later) which combination of them to use."""
