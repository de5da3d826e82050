// Links libcolibri.a from COLIBRI_PREFIX (or from where colibri.h's usual prefix is, /usr/local).

fn main() {
    let prefix = std::env::var("COLIBRI_PREFIX").unwrap_or_else(|_| "/usr/local".to_string());
    println!("cargo:rerun-if-env-changed=COLIBRI_PREFIX");
    println!("cargo:rustc-link-search=native={prefix}/lib");
    println!("cargo:rustc-link-lib=static=colibri");
    println!("cargo:rustc-link-lib=m");
    println!("cargo:rustc-link-lib=pthread");
}
