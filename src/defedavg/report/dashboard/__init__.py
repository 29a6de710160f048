"""The live view: a local web server that lists runs and draws their curves as they grow."""
