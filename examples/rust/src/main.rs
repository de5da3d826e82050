//! Continues a prompt, greedily; the text appears as it is made.
//!
//!     COLIBRI_PREFIX=PREFIX cargo run --offline --release -- model.colibri "Once upon a time" [tokens]

mod colibri;
mod ffi;

use std::error::Error;
use std::io::Write;
use std::process::ExitCode;

fn tell(path: &str, prompt: &str, most: usize) -> Result<(), Box<dyn Error>> {
    let model = colibri::Model::open(path)?;
    let mut session = colibri::Session::new(&model)?;
    let mut stream = model.stream();
    let ends = model.end_tokens()?;
    let mut out = std::io::stdout();
    let mut tokens = model.tokenize(prompt)?;
    write!(out, "{prompt}")?;
    for _ in 0..most {
        let token = session.next(&tokens)?;
        if ends.contains(&token) {
            break;
        }
        write!(out, "{}", stream.add(token)?)?;
        out.flush()?;
        tokens = vec![token];
    }
    writeln!(out, "{}", stream.add(-1)?)?;
    Ok(())
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    if arguments.len() < 3 {
        eprintln!("usage: story MODEL PROMPT [TOKENS]");
        return ExitCode::from(2);
    }
    let most = arguments.get(3).and_then(|n| n.parse().ok()).unwrap_or(60);
    match tell(&arguments[1], &arguments[2], most) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("story: {error}");
            ExitCode::FAILURE
        }
    }
}
