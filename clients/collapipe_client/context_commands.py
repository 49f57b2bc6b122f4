"""`collapipe context`: names deployments, so that commands need no addresses and certificates."""

import shlex
from typing import Annotated

import typer

from collapipe.errors import InvalidInputError
from collapipe_client.cli_options import AsJson, takes_option_groups
from collapipe_client.completion import context_names
from collapipe_client.contexts import Context, contexts_document, read_contexts, write_contexts
from collapipe_client.endpoint import EndpointOptions, find_endpoint
from collapipe_client.reporting import exit_codes, plain_table, print_json, print_table, say

context_app = typer.Typer(
    no_args_is_help=True, help="Name the deployments that other commands talk to."
)

Name = Annotated[str, typer.Argument(help="Name of the context.", autocompletion=context_names)]


@context_app.command("add")
@takes_option_groups
def add(name: Name, endpoint_options: EndpointOptions, as_json: AsJson = False) -> None:
    """Keep --scheduler and its certificate under a name. An earlier context of this name is replaced."""
    with exit_codes(as_json):
        if not name or endpoint_options.scheduler is None:
            raise InvalidInputError(
                "--scheduler is not given: name the scheduler of the deployment, for example "
                f"collapipe context add {shlex.quote(name or 'lab')} --scheduler HOST:7100 --tls-ca FILE --tls-cert FILE --tls-key FILE"
            )
        # It refuses an address or a certificate that no call could use.
        find_endpoint(endpoint_options)
        contexts = read_contexts()
        contexts.by_name[name] = Context(
            endpoint_options.scheduler,
            endpoint_options.insecure,
            *(
                file and file.absolute()
                for file in (
                    endpoint_options.tls_ca,
                    endpoint_options.tls_cert,
                    endpoint_options.tls_key,
                )
            ),
        )
        write_contexts(contexts)
        if as_json:
            print_json({"added": name})
        else:
            say(
                f"context {name} is kept: `collapipe context use {shlex.quote(name)}` makes all commands use it"
            )


@context_app.command("use")
def use(
    name: Annotated[
        str,
        typer.Argument(
            metavar="[NAME]",
            help="Without it: the local testbed.",
            autocompletion=context_names,
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Let all commands use a context. Without a name, they use the local testbed again."""
    with exit_codes(as_json):
        contexts = read_contexts()
        if name:
            contexts.find(name)
        contexts.used = name
        write_contexts(contexts)
        if as_json:
            print_json({"used": name})
        else:
            say(f"commands use {f'the context {name}' if name else 'the local testbed'} now")


@context_app.command("remove")
def remove(name: Name, as_json: AsJson = False) -> None:
    """Forget a context."""
    with exit_codes(as_json):
        contexts = read_contexts()
        contexts.find(name)
        del contexts.by_name[name]
        if contexts.used == name:
            contexts.used = ""
        write_contexts(contexts)
        if as_json:
            print_json({"removed": name})
        else:
            say(f"context {name} is removed")


@context_app.command("list")
def list_contexts(as_json: AsJson = False) -> None:
    """List the contexts. A star marks the one that commands use."""
    with exit_codes(as_json):
        contexts = read_contexts()
        if as_json:
            document = contexts_document(contexts)
            print_json({"used": document["used"], "contexts": document["by_name"]})
            return
        table = plain_table("", "context", "scheduler", "certificate")
        for name, context in sorted(contexts.by_name.items()):
            certificate = "plain text" if context.insecure else str(context.tls_cert)
            table.add_row(
                "*" if name == contexts.used else "", name, context.scheduler, certificate
            )
        print_table(table)
