# Everything a newcomer needs. Each target makes .venv when it is not there and does nothing twice.
#
#   make chat  ARGS="--temperature 0.5"     talk to the default model
#   make serve ARGS="--port 9000"           serve it over HTTP
#   make test  ARGS="tests/engine -x"       run the tests
#   make test-long                          soaks and large matrices
#   make check                              lint, types, which package may import which
#   make clean                              remove the environment
#   PYTHON=python3.13, VENV=.venv-3.13      another interpreter, another environment

VENV ?= .venv
export VENV
ifdef PYTHON
export PYTHON
endif

.PHONY: help setup chat serve test test-long check clean

help:
	@sed -n 's/^#   //p' Makefile

setup:
	@scripts/setup

# `exec`: the program itself, and no shell around it, gets Ctrl-C and the exit code.
chat: setup
	@exec $(VENV)/bin/jaxserve chat $(ARGS)

serve: setup
	@exec $(VENV)/bin/jaxserve serve $(ARGS)

test:
	@scripts/test $(ARGS)

test-long:
	@scripts/test -m long $(ARGS)

check:
	@scripts/check

clean:
	rm -rf $(VENV)
