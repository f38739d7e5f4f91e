//! Prints the OpenAPI document of the HTTP API: `make openapi`.

fn main() {
    print!("{}", daemon::openapi_document());
}
