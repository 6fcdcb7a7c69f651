"""coterie's methods on Ray: simulations of many clients over several processes or machines.

One actor holds a group of clients, vectorised as in the local engine. Everything is inside one trust domain: Ray has no
authentication of its own, and sends the model's code and the rows by cloudpickle.
"""
